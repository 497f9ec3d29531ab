//! Writing back: which pages of a tier are nowhere below it, and which of them go down before the
//! tier lets them go.
//!
//! The tier is a store, shared, and lets go of what it likes when it is full. So while it is nearly full,
//! no more than a part of it may be nowhere else: what was used longest ago is written down, and leaves.
//! (Were it left there, having been read would make it the last to go.)

use super::WritePolicy;
use super::prompt::Pages;
use super::shared::Shared;
use super::shelf::Shelf;
use super::writer::Link;
use parking_lot::Mutex;
use ritornello_format::residency::Tier;
use ritornello_format::{PageHash, Scope};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// The tier above is nearly full at so many quarters,
const FULL_QUARTERS: u64 = 3;
/// and then at most so many quarters of it may be nowhere below it.
const DIRTY_QUARTERS: u64 = 1;
/// Pages that are written down at once.
const BATCH: usize = 64;

/// Pages that are nowhere below the tier above, as far as this process put them there.
#[derive(Debug, Default)]
pub(super) struct Back(Mutex<Lines>);

#[derive(Debug, Default)]
struct Lines {
    pages: HashMap<PageHash, Line>,
    dirty_bytes: u64,
}

/// A page, and the one before it: prompts are put together from these.
#[derive(Debug)]
struct Line {
    scope: Arc<Scope>,
    page_bytes: u64,
    key: Box<[u8]>,
    before: Option<PageHash>,
    /// The key before a first page that is not a prompt's.
    parent: Option<Box<[u8]>>,
    dirty: bool,
}

impl Back {
    fn add(&self, pages: &Pages, range: Range<usize>) {
        let mut lines = self.0.lock();
        for at in 0..range.end {
            let line = lines.pages.entry(pages.hashes[at]).or_insert_with(|| Line {
                scope: Arc::clone(&pages.scope),
                page_bytes: pages.page_bytes,
                key: pages.keys[at].clone(),
                before: at.checked_sub(1).map(|before| pages.hashes[before]),
                parent: pages.parent.clone().filter(|_| at == 0),
                dirty: false,
            });
            if range.contains(&at) && !line.dirty {
                line.dirty = true;
                lines.dirty_bytes += pages.page_bytes;
            }
        }
    }

    fn dirty_bytes(&self) -> u64 {
        self.0.lock().dirty_bytes
    }

    /// The prompt that ends with the page `last`, and which of its last `count` pages are dirty, from
    /// the first of them on. They are taken to be clean from now on.
    fn take(&self, last: PageHash, count: usize) -> Option<(Pages, Range<usize>)> {
        let mut lines = self.0.lock();
        let (mut keys, mut next, mut parent) = (Vec::new(), Some(last), None);
        let mut first_dirty = None;
        while let Some(hash) = next {
            let line = lines.pages.get_mut(&hash)?;
            if std::mem::take(&mut line.dirty) {
                if keys.len() < count {
                    first_dirty = Some(keys.len());
                    lines.dirty_bytes -= line.page_bytes;
                } else {
                    line.dirty = true;
                }
            }
            let line = lines.pages.get(&hash)?;
            keys.push(line.key.clone());
            (next, parent) = (line.before, line.parent.clone());
        }
        let scope = Arc::clone(&lines.pages.get(&last)?.scope);
        // Dirty pages are the only reason to know any.
        if lines.dirty_bytes == 0 {
            lines.pages.clear();
        }
        drop(lines);
        let end = keys.len();
        let from = end - 1 - first_dirty?;
        keys.reverse();
        Some((Pages::new(scope, keys, parent).ok()?, from..end))
    }
}

impl Shared {
    /// Notes that pages came to a tier, for the tier below if that is written to late.
    pub(super) fn arrived(self: &Arc<Self>, tier: Tier, pages: &Pages, range: Range<usize>) {
        let above = self.tiers().position(|other| other == tier);
        let below = above.and_then(|at| self.tiers().nth(at + 1)).and_then(|to| self.link(to));
        let Some(link) = below.filter(|link| link.policy == WritePolicy::Back) else { return };
        if range.is_empty() {
            return;
        }
        link.back.add(pages, range.clone());
        self.note(tier, pages, range);
        self.watch(link);
    }

    /// Has the pages written down that the tier above is about to let go.
    pub(super) fn clean(self: &Arc<Self>, link: &Link) {
        let dirty = link.back.dirty_bytes();
        let Some(above) = self.above(link.to).filter(|_| dirty > 0) else { return };
        let Ok(stats) = above.store().stats() else { return };
        let (used, all) =
            (stats.catalog.used_bytes, stats.catalog.segments_max * stats.catalog.segment_bytes);
        let nearly_full = used >= all / 4 * FULL_QUARTERS;
        let too_dirty = || link.back.dirty_bytes() > all / 4 * DIRTY_QUARTERS;
        while nearly_full && too_dirty() && link.has_room() && self.write_back(link, true) {}
    }

    /// Takes pages from the tier above `below`, where they are now; what is behind them goes as well.
    pub(super) fn leave(&self, below: Tier, pages: &Pages, range: Range<usize>) {
        let Some(above) = self.above(below).filter(|_| !range.is_empty()) else { return };
        if let Err(error) = above.store().delete(&pages.scope, &pages.refs(range)) {
            tracing::debug!(%error, "pages that were written back stay where they are");
        }
    }

    fn above(&self, below: Tier) -> Option<&Shelf> {
        self.shelves.iter().rev().find(|shelf| shelf.tier < below)
    }

    /// Has some pages written down that are nowhere below the tier above; with `leave` that lets them
    /// go then. Returns whether there are more.
    pub(super) fn write_back(self: &Arc<Self>, link: &Link, leave: bool) -> bool {
        let Some(above) = self.above(link.to) else { return false };
        let victims = self.table.evict(above.tier, BATCH);
        for victim in &victims {
            let Some(last) = victim.pages.last() else { continue };
            if let Some((pages, range)) = link.back.take(*last, victim.pages.len()) {
                self.table.forget(link.to, &pages.hashes, range.clone());
                self.take_down(link, &pages, range, None, leave);
            }
        }
        !victims.is_empty() && link.back.dirty_bytes() > 0
    }
}

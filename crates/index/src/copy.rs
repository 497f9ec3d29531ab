//! One index into another, whatever their backends: names of runs change, nothing else does.

use crate::{NewRun, PrefixIndex, RunId, RunView, SyncData};
use ritornello_format::{ErrorKind, PageHash, Result, ScopeSlot};
use std::collections::HashMap;

/// The copy is synced when it has grown by this much, so that little waits in memory.
const SYNC_BYTES: usize = 4 << 20;

/// What [`copy`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Runs that are in the copy.
    pub runs: u64,
    /// Their pages.
    pub pages: u64,
    /// Runs that did not add up, and what hung behind them.
    pub dropped: u64,
}

/// Inserts every run of `from`, which nobody changes meanwhile, into `to`, which is empty; then
/// `to` is durable. Kept are scopes, attachments, holes, places, recency, retentions and the clock.
/// A run comes after the one it is attached behind, however late they were linked. `progress` hears
/// how many runs there are in the copy.
///
/// # Errors
/// What `to` refuses with: it then holds a part. Those of `sync_data`.
pub fn copy(
    from: &dyn PrefixIndex,
    to: &dyn PrefixIndex,
    sync_data: SyncData<'_>,
    progress: &mut dyn FnMut(u64),
) -> Result<Copied> {
    let mut work = Copier {
        from,
        to,
        sync_data,
        progress,
        waiting: HashMap::new(),
        links: Vec::new(),
        unsynced: 0,
        copied: Copied::default(),
    };
    let mut failed = Ok(());
    from.for_each(&mut |run, view| {
        if failed.is_ok() {
            failed = work.copy_run(run, view);
        }
    });
    failed?;
    work.copy_waiting()?;
    to.retain(&[], from.clock());
    to.sync_after(sync_data)?;
    Ok(work.copied)
}

struct Copier<'a> {
    from: &'a dyn PrefixIndex,
    to: &'a dyn PrefixIndex,
    sync_data: SyncData<'a>,
    progress: &'a mut dyn FnMut(u64),
    /// Runs by the one they are attached behind, which is not in the copy yet.
    waiting: HashMap<RunId, Vec<RunId>>,
    /// What to link in the end: scope, parent, child.
    links: Vec<(ScopeSlot, PageHash, PageHash)>,
    /// About as many bytes were inserted since the last sync.
    unsynced: usize,
    copied: Copied,
}

impl Copier<'_> {
    /// Copies a run if what it is attached behind is there, and then those that wait for it.
    fn copy_run(&mut self, run: RunId, view: RunView) -> Result<()> {
        let mut ready = vec![(run, view)];
        while let Some((run, view)) = ready.pop() {
            let parent = match view.parent {
                None => None,
                Some((parent, page)) => match self.from.page(parent, page) {
                    Some(hash) if self.to.locate(view.scope, hash).is_some() => Some(hash),
                    Some(_) => {
                        self.waiting.entry(parent).or_default().push(run);
                        continue;
                    }
                    None => {
                        self.drop_behind(run);
                        continue;
                    }
                },
            };
            if !self.insert(run, &view, parent)? {
                self.drop_behind(run);
                continue;
            }
            for child in self.waiting.remove(&run).unwrap_or_default() {
                ready.extend(self.from.run(child).map(|view| (child, view)));
            }
        }
        Ok(())
    }

    /// What waits in the end: behind a run that was dropped, or behind itself. Nothing honest is a
    /// ring, but a ring is kept as it is.
    fn copy_waiting(&mut self) -> Result<()> {
        while let Some(&parent) = self.waiting.keys().next() {
            let children = self.waiting.remove(&parent).unwrap_or_default();
            for child in children {
                let Some(view) = self.from.run(child) else { continue };
                let behind = view.parent.and_then(|(parent, page)| self.from.page(parent, page));
                let (Some(behind), Some(first)) = (behind, view.pages.first().copied()) else {
                    self.drop_behind(child);
                    continue;
                };
                self.links.push((view.scope, behind, first));
                self.copy_run(child, RunView { parent: None, ..view })?;
            }
        }
        for (scope, parent, child) in std::mem::take(&mut self.links) {
            if self.to.locate(scope, parent).is_some() {
                self.to.link(scope, parent, child);
                continue;
            }
            for gone in self.to.remove(scope, &[child]) {
                self.copied.pages -= u64::from(gone.pages);
                self.copied.runs -= 1;
                self.copied.dropped += 1;
            }
        }
        Ok(())
    }

    /// Counts a run as dropped, and what waits for it. What comes later and is attached to it will
    /// not find it, and waits until the end.
    fn drop_behind(&mut self, run: RunId) {
        let mut gone = vec![run];
        while let Some(run) = gone.pop() {
            self.copied.dropped += 1;
            gone.extend(self.waiting.remove(&run).unwrap_or_default());
        }
    }

    /// Whether it was taken.
    fn insert(&mut self, run: RunId, view: &RunView, parent: Option<PageHash>) -> Result<bool> {
        let mut pages = view.pages.clone();
        // Holes are made again by removing what stands in for them.
        let mut stand_ins = Vec::new();
        for (at, page) in pages.iter_mut().enumerate().filter(|(_, page)| **page == PageHash::NONE)
        {
            page.0[..8].copy_from_slice(&run.0.to_le_bytes());
            page.0[8..12].copy_from_slice(&(at as u32).to_le_bytes());
            page.0[12..].fill(0xa5);
            stand_ins.push(*page);
        }
        if view.chained && !stand_ins.is_empty() {
            return Ok(false);
        }
        let inserted = self.to.insert(&NewRun {
            scope: view.scope,
            chained: view.chained,
            parent,
            pages: &pages,
            place: &view.place,
            recency: view.recency,
        });
        let name = match inserted {
            Ok(name) => name,
            Err(error) if error.kind() == ErrorKind::Invalid => {
                tracing::warn!(%error, ?run, "a run does not add up and is not copied");
                return Ok(false);
            }
            Err(error) => return Err(error),
        };
        if !stand_ins.is_empty() {
            self.to.remove(view.scope, &stand_ins);
        }
        if view.retain_until > 0 {
            self.to.retain(&[(name, view.retain_until)], 0);
        }
        self.copied.runs += 1;
        self.copied.pages += (pages.len() - stand_ins.len()) as u64;
        self.unsynced += 128 + size_of::<PageHash>() * pages.len();
        if self.unsynced > SYNC_BYTES {
            self.unsynced = 0;
            self.to.sync_after(self.sync_data)?;
        }
        (self.progress)(self.copied.runs);
        Ok(true)
    }
}

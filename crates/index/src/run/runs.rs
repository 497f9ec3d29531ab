//! The table of runs: one record each, in chunks that never move and, except the first, are freed
//! when they are empty.
//!
//! A run's name consists of the number of its record and of the record's reuse count. A record
//! whose count cannot grow further is retired. A new run takes a record of the first chunk that has
//! a free record, so that chunks at the end become empty.

use super::record::{Cold, Extents, Hot, Pages};
use super::slots::{NUMBER_MAX, Number};
use crate::sync::Ordering;
use crate::{RunId, RunView};
use ritornello_format::journal::{Retentions, RunImage};
use ritornello_format::{Extent, PageHash, Place, ScopeSlot};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// Number zero, which is never assigned to a run.
pub(crate) const NO_RUN: Number = 0;

/// An open assigns new names to all runs if the largest reuse count is at least this number.
const RENUMBER_AT: u32 = 1 << 31;

/// Bytes that a retained run takes in a checkpoint, in addition to its [`RunImage`].
const RETAINED_BYTES: usize = Retentions::bytes(1) - Retentions::bytes(0);

/// Maximum bytes of memory per retained run, because leaves of a B-tree are at least half full.
const RETAINED_MEMORY: usize = 2 * size_of::<(Number, u64)>();

const CHUNK_BITS: u32 = if cfg!(feature = "loom") { 2 } else { 10 };
const CHUNK: usize = 1 << CHUNK_BITS;

const CHUNK_BYTES: usize = CHUNK * (size_of::<Hot>() + size_of::<Cold>());

/// The free records of a chunk, and the number of its records in use.
#[derive(Clone, Copy, Debug)]
struct Free {
    /// The first free record; [`Cold::next`] links the other free records.
    first: Number,
    /// Number of records in use.
    taken: u32,
}

#[derive(Debug, Default)]
pub(crate) struct Runs {
    /// The hot halves of the records by chunk; `cold` has the cold halves. A freed chunk has length
    /// zero.
    hot: Vec<Box<[Hot]>>,
    cold: Vec<Box<[Cold]>>,
    free: Vec<Free>,
    /// Chunks with free records.
    open: BTreeSet<usize>,
    /// Chunks that were freed.
    freed: BTreeSet<usize>,
    /// The largest reuse count assigned so far.
    pub(crate) reuse: u32,
    /// Minimum reuse count of new runs: larger than all counts that were assigned before the open,
    /// or before a chunk was last freed. The records of a new chunk begin at count zero, although
    /// earlier runs may have had their numbers; the minimum keeps the names of these earlier runs
    /// from being assigned again.
    pub(crate) reuse_floor: u32,
    pub(crate) live: u64,
    pub(crate) pages: u64,
    heap_bytes: usize,
    /// Bytes that all runs and retentions take in a checkpoint, without frames.
    pub(crate) image_bytes: u64,
    /// The ends of retentions, by run. Few runs are retained, so a record has no field for the end
    /// of its retention.
    retained: BTreeMap<Number, u64>,
    /// See [`crate::PrefixIndex::clock`].
    pub(crate) clock: u64,
}

/// The part of a run that a cut removed.
#[derive(Debug)]
pub(crate) struct Cut {
    pub(crate) whole: bool,
    /// Number of live pages removed.
    pub(crate) pages: u32,
    /// Number of the first page of `hashes`.
    pub(crate) first: u16,
    /// The hashes of the pages after the cut; [`PageHash::NONE`] for a page that was removed
    /// earlier.
    pub(crate) hashes: Vec<PageHash>,
    pub(crate) extents: Vec<Extent>,
}

impl Runs {
    pub(crate) fn new() -> Self {
        Self { reuse_floor: 1, ..Self::default() }
    }

    #[inline]
    pub(crate) fn hot(&self, run: Number) -> &Hot {
        &self.hot[run as usize >> CHUNK_BITS][run as usize % CHUNK]
    }
    pub(crate) fn hot_mut(&mut self, run: Number) -> &mut Hot {
        &mut self.hot[run as usize >> CHUNK_BITS][run as usize % CHUNK]
    }
    pub(crate) fn cold(&self, run: Number) -> &Cold {
        &self.cold[run as usize >> CHUNK_BITS][run as usize % CHUNK]
    }
    pub(crate) fn cold_mut(&mut self, run: Number) -> &mut Cold {
        &mut self.cold[run as usize >> CHUNK_BITS][run as usize % CHUNK]
    }

    /// One past the largest number of a record in any chunk, freed chunks included.
    pub(crate) fn end(&self) -> Number {
        (self.hot.len() * CHUNK) as Number
    }

    pub(crate) fn id(&self, run: Number) -> RunId {
        RunId(u64::from(self.cold(run).reuse) << 32 | u64::from(run))
    }

    /// The run's number, if the run still exists.
    pub(crate) fn number(&self, id: RunId) -> Option<Number> {
        let run = id.0 as u32;
        (run != NO_RUN && self.is_live(run) && self.id(run) == id).then_some(run)
    }

    /// Whether a run exists. Returns `false` for a number that has no record.
    pub(crate) fn is_live(&self, run: Number) -> bool {
        let chunk = self.hot.get(run as usize >> CHUNK_BITS);
        chunk.and_then(|chunk| chunk.get(run as usize % CHUNK)).is_some_and(|hot| hot.length > 0)
    }

    /// Allocates chunk `chunk`, a freed chunk or the next new chunk, with all its records free.
    fn make_chunk(&mut self, chunk: usize) {
        let first = (chunk * CHUNK) as Number;
        let hot = (0..CHUNK).map(|_| Hot::default()).collect();
        let mut cold: Box<[Cold]> = (0..CHUNK).map(|_| Cold::default()).collect();
        for (next, record) in (first + 1..).zip(&mut cold[..CHUNK - 1]) {
            record.next = next;
        }
        // Record zero stands for no run.
        let free = if chunk == 0 { Free { first: 1, taken: 1 } } else { Free { first, taken: 0 } };
        if chunk == self.hot.len() {
            self.hot.push(hot);
            self.cold.push(cold);
            self.free.push(free);
        } else {
            (self.hot[chunk], self.cold[chunk], self.free[chunk]) = (hot, cold, free);
            self.freed.remove(&chunk);
        }
        self.open.insert(chunk);
    }

    /// Frees the memory of a chunk without live records. `reuse_floor` keeps the names of the
    /// chunk's former runs from being assigned again.
    fn free_chunk(&mut self, chunk: usize) {
        (self.hot[chunk], self.cold[chunk]) = (Box::default(), Box::default());
        self.open.remove(&chunk);
        self.freed.insert(chunk);
        self.reuse_floor = self.reuse_floor.max(self.reuse.saturating_add(1));
    }

    /// Allocates records up to `run`.
    fn grow_to(&mut self, run: Number) {
        while self.hot.len() <= run as usize >> CHUNK_BITS {
            self.make_chunk(self.hot.len());
        }
    }

    /// A record for a new run, which is not published yet. `None` if all numbers are in use.
    pub(crate) fn allocate(&mut self) -> Option<Number> {
        if self.open.is_empty() {
            let chunk = self.freed.first().copied().unwrap_or(self.hot.len());
            if chunk * CHUNK > NUMBER_MAX as usize {
                return None;
            }
            self.make_chunk(chunk);
        }
        let chunk = *self.open.first()?;
        let run = self.free[chunk].first;
        let next = self.cold(run).next;
        self.free[chunk] = Free { first: next, taken: self.free[chunk].taken + 1 };
        if next == NO_RUN {
            self.open.remove(&chunk);
        }
        let floor = self.reuse_floor;
        let cold = self.cold_mut(run);
        cold.next = NO_RUN;
        cold.reuse = cold.reuse.saturating_add(1).max(floor);
        self.reuse = self.reuse.max(self.cold(run).reuse);
        Some(run)
    }

    /// Frees the record of a removed run whose slots are removed already.
    pub(crate) fn release(&mut self, run: Number) {
        // Retire the record: a further run of this record would get the same name.
        if self.cold(run).reuse == u32::MAX {
            return;
        }
        let chunk = run as usize >> CHUNK_BITS;
        let Free { first, taken } = self.free[chunk];
        self.cold_mut(run).next = first;
        self.free[chunk] = Free { first: run, taken: taken - 1 };
        if taken == 1 {
            self.free_chunk(chunk);
        } else {
            self.open.insert(chunk);
        }
    }

    /// Returns whether no chunk has a free record, so that the next run needs another chunk.
    fn is_packed(&self) -> bool {
        self.open.is_empty()
    }

    /// Fills a record. [`Runs::publish`] makes its run visible.
    pub(crate) fn fill(
        &mut self,
        run: Number,
        scope: ScopeSlot,
        chained: bool,
        recency: u64,
        pages: Pages,
    ) {
        let hot = self.hot_mut(run);
        hot.scope = scope;
        hot.chained = chained;
        hot.touched.store(false, Ordering::Relaxed);
        hot.pages = pages;
        let live = hot.pages.as_slice().iter().filter(|page| **page != PageHash::NONE).count();
        self.heap_bytes += self.hot(run).pages.heap_bytes();
        let cold = self.cold_mut(run);
        cold.live = live as u16;
        cold.recency.store(recency, Ordering::Relaxed);
    }

    /// The pages of a run, published or not.
    pub(crate) fn all_pages(&self, run: Number) -> &[PageHash] {
        self.hot(run).pages.as_slice()
    }

    pub(crate) fn publish(&mut self, run: Number) {
        let hot = self.hot_mut(run);
        hot.length = hot.pages.as_slice().len() as u16;
        self.live += 1;
        self.pages += u64::from(self.cold(run).live);
        self.image_bytes += self.image_size(run);
    }

    fn image_size(&self, run: Number) -> u64 {
        let extents = self.cold(run).extents.as_slice().len();
        RunImage::bytes(self.hot(run).pages().len(), extents) as u64
    }

    pub(crate) fn place(&self, run: Number) -> Place {
        self.cold(run).place()
    }

    pub(crate) fn set_place(&mut self, run: Number, place: &Place) {
        let published = self.is_live(run);
        let before = if published { self.image_size(run) } else { 0 };
        let (freed, taken) = self.cold_mut(run).set_place(place);
        self.heap_bytes = self.heap_bytes + taken - freed;
        let after = if published { self.image_size(run) } else { 0 };
        self.image_bytes = self.image_bytes + after - before;
    }

    pub(crate) fn view(&self, run: Number) -> RunView {
        let (hot, cold) = (self.hot(run), self.cold(run));
        RunView {
            scope: hot.scope,
            chained: hot.chained,
            parent: (cold.parent != NO_RUN)
                .then(|| (self.id(cold.parent), u32::from(cold.parent_page))),
            pages: hot.pages().to_vec(),
            place: self.place(run),
            recency: cold.recency.load(Ordering::Relaxed),
            retain_until: self.retained.get(&run).copied().unwrap_or_default(),
        }
    }

    pub(crate) fn image(&self, run: Number) -> RunImage<'_> {
        let (hot, cold) = (self.hot(run), self.cold(run));
        RunImage {
            run: self.id(run).0,
            scope: hot.scope,
            chained: hot.chained,
            parent: (cold.parent != NO_RUN).then(|| (self.id(cold.parent).0, cold.parent_page)),
            recency: cold.recency.load(Ordering::Relaxed),
            place: Cow::Owned(self.place(run)),
            pages: Cow::Borrowed(hot.pages()),
        }
    }

    /// Sets the end of a live run's retention; zero ends it.
    pub(crate) fn retain(&mut self, run: Number, until: u64) {
        let entry = RETAINED_BYTES as u64;
        let before = self.retained.len() as u64;
        if until == 0 {
            self.retained.remove(&run);
        } else {
            self.retained.insert(run, until);
        }
        self.image_bytes = self.image_bytes + entry * self.retained.len() as u64 - entry * before;
    }

    /// The names of retained runs starting at number `first`, and the ends of their retentions.
    pub(crate) fn retained(&self, first: Number) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.retained.range(first..).map(|(run, until)| (self.id(*run).0, *until))
    }

    /// Attaches `child`, which has no parent, to page `page` of `parent`.
    pub(crate) fn attach(&mut self, child: Number, parent: Number, page: u16) {
        let first = std::mem::replace(&mut self.cold_mut(parent).child, child);
        if first != NO_RUN {
            self.cold_mut(first).previous = child;
        }
        let cold = self.cold_mut(child);
        cold.parent = parent;
        cold.parent_page = page;
        cold.previous = NO_RUN;
        cold.next = first;
    }

    /// Detaches `child` from its parent, if any.
    pub(crate) fn detach(&mut self, child: Number) {
        let cold = self.cold_mut(child);
        let parent = std::mem::take(&mut cold.parent);
        if parent == NO_RUN {
            return;
        }
        let (previous, next) = (std::mem::take(&mut cold.previous), std::mem::take(&mut cold.next));
        if previous == NO_RUN {
            self.cold_mut(parent).child = next;
        } else {
            self.cold_mut(previous).next = next;
        }
        if next != NO_RUN {
            self.cold_mut(next).previous = previous;
        }
    }

    /// The runs attached to page `from` of `run`, or to later pages.
    pub(crate) fn children(&self, run: Number, from: u16) -> impl Iterator<Item = Number> + '_ {
        let first = Some(self.cold(run).child);
        std::iter::successors(first, |run| Some(self.cold(*run).next))
            .take_while(|run| *run != NO_RUN)
            .filter(move |run| self.cold(*run).parent_page >= from)
    }

    /// Cuts a published run after `keep` pages. If no live page is left before the cut, the whole
    /// run is removed. No run may be attached to a page after the cut.
    pub(crate) fn cut(&mut self, run: Number, keep: u16) -> Option<Cut> {
        let pages = self.hot(run).pages();
        let keep = usize::from(keep);
        if keep >= pages.len() {
            return None;
        }
        let is_live = |page: &&PageHash| **page != PageHash::NONE;
        let kept = pages[..keep].iter().filter(is_live).count();
        let (whole, keep) = if kept == 0 { (true, 0) } else { (false, keep) };
        let hashes = pages[keep..].to_vec();
        let freed = hashes.iter().filter(is_live).count();
        let image_bytes = self.image_bytes - self.image_size(run);
        let mut place = self.place(run);
        let extents = crate::live_extents::held(&place, pages, keep as u32);
        place.truncate(keep as u32);
        if whole {
            self.detach(run);
            self.live -= 1;
        }
        self.pages -= freed as u64;
        self.set_place(run, &place);
        self.shorten(run, keep);
        self.image_bytes = image_bytes + if whole { 0 } else { self.image_size(run) };
        let cold = self.cold_mut(run);
        cold.live -= freed as u16;
        if whole {
            self.retain(run, 0);
        }
        Some(Cut { whole, pages: freed as u32, first: keep as u16, hashes, extents })
    }

    /// Shortens a run to its first `keep` pages, and frees the hashes of the other pages.
    fn shorten(&mut self, run: Number, keep: usize) {
        let hot = self.hot_mut(run);
        hot.length = keep as u16;
        let before = hot.pages.heap_bytes();
        hot.pages = Pages::new(hot.pages());
        let after = hot.pages.heap_bytes();
        self.heap_bytes = self.heap_bytes + after - before;
    }

    /// Removes page `page` alone from a run that keeps at least one other page. Returns the page's
    /// hash and extents; `None` if the page was already removed or is the only page left.
    pub(crate) fn punch(&mut self, run: Number, page: u16) -> Option<(PageHash, Vec<Extent>)> {
        let hash = *self.hot(run).pages().get(usize::from(page))?;
        if hash == PageHash::NONE || self.cold(run).live <= 1 {
            return None;
        }
        self.hot_mut(run).pages.clear(usize::from(page));
        self.cold_mut(run).live -= 1;
        self.pages -= 1;
        Some((hash, self.place(run).page(u32::from(page))))
    }

    /// Restores a run from a checkpoint or journal, unless its number was already used for the same
    /// run or a later run. Returns whether the run was restored.
    pub(crate) fn restore(&mut self, image: RunImage<'static>) -> bool {
        let (run, reuse) = (image.run as u32, (image.run >> 32) as u32);
        if run == NO_RUN || run > NUMBER_MAX {
            return false;
        }
        self.grow_to(run);
        if self.cold(run).reuse >= reuse {
            return false;
        }
        if self.is_live(run) {
            // An earlier run still has the number: its removal was in a part of the journal that
            // could not be read.
            let _ = self.cut(run, 0);
        }
        self.reuse = self.reuse.max(reuse);
        self.cold_mut(run).reuse = reuse;
        let pages = Pages::new(image.pages.into_owned());
        self.fill(run, image.scope, image.chained, image.recency, pages);
        self.set_place(run, &image.place);
        self.publish(run);
        true
    }

    /// Assigns new names to all runs if the largest reuse count is at least [`RENUMBER_AT`].
    /// Returns whether names changed; older files, which have the old names, must then not be read
    /// again.
    pub(crate) fn renumber(&mut self) -> bool {
        if self.reuse < RENUMBER_AT {
            return false;
        }
        for (hot, cold) in self.hot.iter().zip(&mut self.cold) {
            for (hot, cold) in hot.iter().zip(cold) {
                cold.reuse = u32::from(hot.length > 0);
            }
        }
        (self.reuse, self.reuse_floor) = (1, 2);
        true
    }

    /// Builds the lists of free records, after all runs are restored.
    pub(crate) fn collect_free(&mut self) {
        self.open.clear();
        for chunk in (0..self.hot.len()).rev() {
            self.free[chunk] = Free { first: NO_RUN, taken: CHUNK as u32 };
            let first = (chunk * CHUNK) as Number;
            for run in (first.max(1)..first + CHUNK as Number).rev() {
                if !self.is_live(run) {
                    self.release(run);
                }
            }
        }
    }

    pub(crate) fn live_pages(&self, run: Number) -> u16 {
        self.cold(run).live
    }

    /// Bytes of memory that a run of `pages` pages and `extents` extents adds, without its slots.
    pub(crate) fn growth(&self, pages: usize, extents: usize) -> usize {
        let chunk = if self.is_packed() { CHUNK_BYTES } else { 0 };
        chunk + Pages::heap_bytes_of(pages) + Extents::heap_bytes_of(extents)
    }

    pub(crate) fn bytes(&self) -> usize {
        (self.hot.len() - self.freed.len()) * CHUNK_BYTES
            + self.heap_bytes
            + self.retained.len() * RETAINED_MEMORY
    }
}

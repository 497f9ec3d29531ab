//! Reads and verifies pages, for `fsck` and scrubbing.

use crate::catalog::ScopeRef;
use crate::core::StoreCore;
use ritornello_format::{ErrorKind, PageHash, Place, Result, UNIT};
use ritornello_index::{RunId, RunView};
use ritornello_volume::transfer::{Control, MissReason, PageOutcome, is_unreadable_on_disk};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum damaged pages listed; further pages are only counted.
const FINDINGS_MAX: usize = 10_000;
/// Maximum time that a verification waits for writes of dead processes.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);

/// How a verification treats pages that the disk cannot read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreadable {
    /// Keep the pages: the fault may be temporary.
    Keep,
    /// Remove the pages: an operator requested it with `fsck` or `paths restore`.
    Drop,
}

/// A page that failed verification.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DamagedPage {
    /// Generation of the page's run.
    pub generation: u64,
    /// Digest of the page's scope, in hexadecimal digits.
    pub scope: String,
    /// Index of the page in the run.
    pub page: u32,
    /// Why the page failed: `scope` if the run's header names another scope or page length, `key`
    /// if it names another key, `header` if the header is damaged or lacks the page, otherwise the
    /// word of a [`MissReason`], such as `checksum` or `io`.
    pub reason: String,
}

/// The result of a verification.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Verification {
    /// Runs examined.
    pub runs: u64,
    /// Pages of the examined runs, including pages that could not be read.
    pub pages: u64,
    /// Bytes of the examined runs.
    pub bytes: u64,
    /// The first 10,000 pages that failed verification and were removed.
    pub findings: Vec<DamagedPage>,
    /// Pages removed, including the pages after a damaged page in a chained scope.
    pub pages_dropped: u64,
    /// Pages of runs that the index did not know, which were found by their headers and inserted
    /// into the index.
    pub pages_salvaged: u64,
    /// Salvaged pages that follow a page which the store lacks: they are hits again
    /// after that page is put.
    pub pages_behind_lost: u64,
    /// Pages that were found and not salvaged, by reason: `scope` if the store lacks the page's
    /// scope, or the scope has another page length; `overwritten` if the page fails verification,
    /// as in an evicted run whose space was reused; `unreadable` if the disk cannot read the page;
    /// `space` if another run has the page's space; `index` if the index refuses the run, for
    /// example because the index is full. In a chained scope the pages after an `overwritten` or
    /// `unreadable` page count with it. Pages that verify and are stored already, or are in another
    /// salvaged run, are not counted.
    pub not_salvaged: BTreeMap<String, u64>,
    /// The highest generation of a run that was found without the index; zero if none was.
    #[serde(skip)]
    pub(crate) generation_max: u64,
    /// Duration of the verification in seconds.
    pub seconds: f64,
}

impl Verification {
    /// Adds the numbers of runs, pages, bytes and dropped pages of `other`, and its damaged pages.
    pub(crate) fn add(&mut self, other: Self) {
        self.runs += other.runs;
        self.pages += other.pages;
        self.bytes += other.bytes;
        self.pages_dropped += other.pages_dropped;
        let room = FINDINGS_MAX.saturating_sub(self.findings.len());
        self.findings.extend(other.findings.into_iter().take(room));
    }
}

impl StoreCore {
    /// Reads and verifies every page outside absent space, and removes pages that are damaged or
    /// that the disk cannot read. With `salvage`, then searches all segments, also those of volumes
    /// that a restore left out, for runs that the index does not know, and inserts their pages that
    /// verify and are not stored: [`super::salvage`]. `progress` receives the number of bytes
    /// examined and their total.
    ///
    /// # Errors
    /// `Closed`; `Retry` if the store is poisoned, or if no sync could begin; `Fatal` if the result
    /// could not be made durable. With `salvage`, also errors of reattaching absent space, of the
    /// scope registry and of the manifest.
    pub fn verify(
        self: &Arc<Self>,
        salvage: bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Verification> {
        self.lifecycle.check_writable()?;
        let started = Instant::now();
        if salvage {
            self.reattach(true)?;
        }
        // Wait for drains, because salvage marks free space as in use, and withheld space does not
        // count as free.
        self.finish_drain(started + DRAIN_TIMEOUT);
        let mut report = Verification::default();
        let mut runs: Vec<(RunId, RunView)> = Vec::new();
        self.index.for_each(&mut |run, view| runs.push((run, view)));
        let used: u64 = runs.iter().map(|(_, view)| view.place.units() * UNIT).sum();
        let segments = if salvage { self.segments.listable() } else { Vec::new() };
        let total = used + segments.len() as u64 * self.shape.budget().segment_bytes;
        for (run, view) in runs {
            if self.lifecycle.is_closed() {
                break;
            }
            if !self.hidden.is_absent(run) {
                let unreadable = Unreadable::Drop;
                self.verify_run(run, &view, &mut report, unreadable, &Control::default());
            }
            progress(report.bytes, total);
        }
        let (mut lost, mut failed) = (Vec::new(), BTreeSet::new());
        for (at, segment) in segments.iter().enumerate() {
            let mut found = |run| lost.push(run);
            if let Err(error) =
                self.segments.scan_headers(*segment, &Control::default(), &mut found)
            {
                tracing::warn!(%error, segment = segment.number(), "a segment cannot be searched");
                failed.insert(segment.volume());
            }
            progress(used + (at as u64 + 1) * self.shape.budget().segment_bytes, total);
        }
        if salvage {
            self.salvage(lost, &mut report)?;
        }
        self.make_durable()?;
        if salvage {
            self.end_search(&failed)?;
        }
        report.seconds = started.elapsed().as_secs_f64();
        Ok(report)
    }

    pub(crate) fn verify_run(
        &self,
        run: RunId,
        view: &RunView,
        report: &mut Verification,
        unreadable: Unreadable,
        control: &Control,
    ) {
        let Some(scope) = self.scopes.by_slot(view.scope) else { return };
        report.runs += 1;
        report.bytes += view.place.units() * UNIT;
        for (page, reason) in self.bad_pages(scope, view, unreadable, control) {
            let hash = view.pages[page as usize];
            let mut state = self.state.lock();
            let before = self.index.stats().pages;
            // Skip the page if its run was removed or moved since the page was read.
            let stays = |now: ritornello_format::Place| now.header() == view.place.header();
            if self.index.locate(scope.slot, hash) != Some((run, page))
                || !self.index.place(run).is_some_and(stays)
            {
                continue;
            }
            self.remove_damaged_page(&mut state, scope, run, hash);
            report.pages_dropped += before.saturating_sub(self.index.stats().pages);
            if report.findings.len() < FINDINGS_MAX {
                report.findings.push(DamagedPage {
                    generation: view.place.generation,
                    scope: scope.id.to_string(),
                    page,
                    reason: reason.to_owned(),
                });
            }
        }
        report.pages += view.pages.iter().filter(|hash| **hash != PageHash::NONE).count() as u64;
    }

    /// Returns the pages of a run that fail verification, with the reason; all pages if the run's
    /// header is damaged or names another scope or page length. With [`Unreadable::Drop`] these
    /// include pages that the disk fails to read, but not pages that were not read for lack of
    /// memory, file descriptors or time.
    fn bad_pages(
        &self,
        scope: ScopeRef,
        view: &RunView,
        unreadable: Unreadable,
        control: &Control,
    ) -> Vec<(u32, &'static str)> {
        let count = view.pages.len() as u32;
        let live = |page: &u32| view.pages[*page as usize] != PageHash::NONE;
        let all = |reason| (0..count).filter(live).map(|page| (page, reason)).collect();
        let found = match self.verify_stored(&view.place, control) {
            Ok(found) => found,
            Err(error) if error.kind() == ErrorKind::Miss => return all("header"),
            Err(error) if unreadable == Unreadable::Drop && is_unreadable_on_disk(&error) => {
                return all("io");
            }
            Err(_) => return Vec::new(),
        };
        let header = &found.header;
        if header.scope != scope.id || header.page_bytes != scope.page_bytes {
            return all("scope");
        }
        let known = |page: u32| {
            let key = header.keys.get(page as usize);
            key.is_some_and(|key| PageHash::of(&scope.id, key) == view.pages[page as usize])
        };
        (0..count)
            .filter(live)
            .filter_map(|page| match found.pages.get(page as usize) {
                Some(PageOutcome::Verified) if known(page) => None,
                Some(PageOutcome::Verified) => Some((page, "key")),
                Some(PageOutcome::Missed(why)) if why.is_damage() => Some((page, why.word())),
                Some(PageOutcome::Missed(MissReason::Io))
                    if unreadable == Unreadable::Drop
                        && self.segments.is_unreadable(&view.place, page) =>
                {
                    Some((page, MissReason::Io.word()))
                }
                // The page was not read, so it does not count as damaged.
                Some(PageOutcome::Missed(_)) => None,
                None => Some((page, "header")),
            })
            .collect()
    }

    /// Whether page `page` of the run in `place`, or the run's header, is damaged on disk, or the
    /// page is missing from the run. A page that cannot be read does not count as damaged: the disk
    /// may recover.
    pub(crate) fn is_damaged(&self, place: &Place, page: u32) -> bool {
        match self.segments.verify_page(place, page, &Control::default()) {
            Ok(PageOutcome::Missed(why)) => why.is_damage(),
            Ok(PageOutcome::Verified) => false,
            Err(error) => error.kind() == ErrorKind::Miss,
        }
    }
}

//! Gets: lease the leading pages, read, verify, release the lease.

use crate::catalog::{Located, ScopeRef};
use crate::encode::Decoder;
use crate::outcome::Outcome;
use crate::store::Store;
use crate::transfer_counts::TransferCounts;
use ritornello_format::{Result, Scope};
use ritornello_volume::page_memory::PageTarget;
use ritornello_volume::transfer::{Control, Encoded, MissReason, PageOutcome, RunRead};
use std::time::Instant;

impl Store {
    /// Reads the leading stored pages (in an unchained scope, every stored page) into `target`,
    /// which has one page per key. The outcome counts a page only if its checksum matched.
    ///
    /// # Errors
    /// `Invalid` for malformed keys or sizes; `Closed`; `Retry` if there are too many leases;
    /// errors of the connection to the owner.
    pub fn get_batch(
        &self,
        scope: &Scope,
        keys: &[&[u8]],
        target: &dyn PageTarget,
        control: &Control,
    ) -> Result<Outcome> {
        self.check_batch(keys, target.len())?;
        if let Some(reason) = control.stop() {
            return Ok(Outcome::none(keys.len(), reason.word()));
        }
        let started = Instant::now();
        let unknown = || Outcome::none(keys.len(), if keys.is_empty() { "" } else { "not_found" });
        let outcome =
            self.with_scope(scope, None, |scope| self.get(scope, keys, target, control).map(Some));
        let outcome = outcome.map(|outcome| outcome.unwrap_or_else(unknown));
        let outcome = self.or_miss(outcome, |reason| Outcome::none(keys.len(), reason))?;
        Ok(outcome.timed(started.elapsed()))
    }

    fn get(
        &self,
        scope: ScopeRef,
        keys: &[&[u8]],
        target: &dyn PageTarget,
        control: &Control,
    ) -> Result<Outcome> {
        let started = Instant::now();
        let located = self.catalog.begin_read(scope, keys)?;
        let reads: Vec<RunRead<'_>> = located
            .runs
            .iter()
            .map(|run| RunRead {
                place: &run.place,
                scope: scope.id,
                page_bytes: scope.page_bytes,
                keys: &keys[run.at as usize..(run.at + run.pages) as usize],
                first: run.first,
                target,
                target_first: run.at as usize,
                encoded: Encoded::Unpack(&Decoder),
            })
            .collect();
        let covered: u64 = located.runs.iter().map(|run| u64::from(run.pages)).sum();
        // A section is announced when all pages of the get have it: if pages are missing, announce
        // no section.
        let all = covered == keys.len() as u64;
        let whole = (!all && control.sections.is_some())
            .then(|| Control { sections: None, ..control.clone() });
        let outcomes = self.segments.read_runs(&reads, whole.as_ref().unwrap_or(control));
        // If the release fails, the lease expires.
        let _ = self.catalog.release(located.lease);
        let (mut ok, mut reason) = (vec![false; keys.len()], "");
        for (run, outcomes) in located.runs.iter().zip(&outcomes) {
            for (at, outcome) in (run.at as usize..).zip(outcomes) {
                match outcome {
                    PageOutcome::Verified => ok[at] = true,
                    PageOutcome::Missed(missed) if reason.is_empty() => reason = missed.word(),
                    PageOutcome::Missed(_) => {}
                }
            }
        }
        self.report(scope, keys, &located, &outcomes, control);
        let verified = ok.iter().filter(|ok| **ok).count() as u64;
        let pages = ok.iter().take_while(|ok| **ok).count();
        if pages < keys.len() && reason.is_empty() {
            reason = "not_found";
        }
        let bytes = verified * scope.page_bytes;
        self.count(&TransferCounts::get(started.elapsed(), bytes, outcomes.iter().flatten()));
        Ok(Outcome { pages, bytes, seconds: 0.0, reason, ok })
    }

    /// Reports pages that failed verification, or could not be read, to the owner. The owner reads
    /// each page itself, and removes the page if the owner's read finds wrong bytes too; a page
    /// that the owner cannot read stays. In a chained scope one page per run is reported, because
    /// all pages after it are removed with it.
    ///
    /// In a process one get of this store reports at a time, and none after its deadline: if a
    /// disk hangs, the owner's reads hang too, and would hold the threads of all gets. The next
    /// reader of a page that was not reported reports it.
    fn report(
        &self,
        scope: ScopeRef,
        keys: &[&[u8]],
        located: &Located,
        outcomes: &[Vec<PageOutcome>],
        control: &Control,
    ) {
        let mut reporting = None;
        for (run, outcomes) in located.runs.iter().zip(outcomes) {
            for (at, outcome) in (run.at as usize..).zip(outcomes) {
                let PageOutcome::Missed(reason) = outcome else { continue };
                let on_disk = reason.is_damage() || *reason == MissReason::Io;
                if !on_disk {
                    continue;
                }
                if control.stop().is_some() {
                    return;
                }
                if reporting.is_none() {
                    let Some(lock) = self.reports.try_lock() else { return };
                    reporting = Some(lock);
                }
                // If the report fails, the next reader will report the page.
                let generation = run.place.generation;
                let _ = self.catalog.report_damage(scope, keys[at], generation, reason.word());
                if scope.chained {
                    break;
                }
            }
        }
    }
}

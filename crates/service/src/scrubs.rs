//! Scrubs, each of which verifies all pages of a store on request: one thread per store that is
//! scrubbed.

use crate::problem::Problem;
use axum::http::StatusCode;
use parking_lot::Mutex;
use ritornello_node::Node;
use ritornello_store::{StoreCore, Verification};
use serde::Serialize;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use utoipa::ToSchema;

/// The progress of a scrub.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ScrubProgress {
    /// `idle` if the service has not scrubbed the store, `running`, `finished`, or `failed`.
    state: &'static str,
    /// Number of runs read so far.
    runs: u64,
    /// Number of runs that the scrub reads in all.
    runs_total: u64,
    /// Number of pages of the runs read so far.
    pages: u64,
    /// Bytes of the runs read so far.
    bytes: u64,
    /// Number of pages that failed verification, counted up to 10,000.
    damaged_pages: usize,
    /// Pages removed: the damaged pages, and in chained scopes the pages after them.
    removed_pages: u64,
    /// Duration of the scrub so far, in seconds.
    seconds: f64,
    /// Why the scrub failed.
    problem: Option<Problem>,
}

impl ScrubProgress {
    fn new(state: &'static str) -> Self {
        let (found, problem) = (Verification::default(), None);
        Self { problem, ..Self::of(state, &found, 0) }
    }

    fn of(state: &'static str, found: &Verification, runs_total: u64) -> Self {
        Self {
            state,
            runs: found.runs,
            runs_total,
            pages: found.pages,
            bytes: found.bytes,
            damaged_pages: found.findings.len(),
            removed_pages: found.pages_dropped,
            seconds: found.seconds,
            problem: None,
        }
    }
}

/// The scrubs of a service, by store.
#[derive(Debug, Default)]
pub(crate) struct Scrubs {
    progress: Arc<Mutex<HashMap<String, ScrubProgress>>>,
    stopped: Arc<AtomicBool>,
}

impl Scrubs {
    /// Returns the progress of the current or the last scrub of `store`.
    pub(crate) fn progress(&self, store: &str) -> ScrubProgress {
        let known = self.progress.lock();
        known.get(store).cloned().unwrap_or_else(|| ScrubProgress::new("idle"))
    }

    /// Begins a scrub of `store`.
    ///
    /// # Errors
    /// 409 if a scrub of the store is running, or this process does not own the store, or reopens
    /// it; 503 if no thread can be started.
    pub(crate) fn begin(&self, store: &str, node: &Node) -> Result<ScrubProgress, Problem> {
        let conflict = |message| Problem::new(StatusCode::CONFLICT, "retry", message);
        let Some(core) = node.core() else {
            return Err(conflict(
                "this process does not own the store now, and only an owner scrubs: wait until it \
                 owns the store",
            ));
        };
        let begun = ScrubProgress::new("running");
        {
            let mut known = self.progress.lock();
            if known.get(store).is_some_and(|progress| progress.state == "running") {
                return Err(conflict(
                    "the store is being scrubbed: `GET /v1/scrub` shows the progress",
                ));
            }
            known.insert(store.to_owned(), begun.clone());
        }
        // If no thread can be started, `thread` is dropped, which shows that the scrub failed.
        let thread = Thread {
            store: store.to_owned(),
            progress: Arc::clone(&self.progress),
            stopped: Arc::clone(&self.stopped),
            is_ended: false,
        };
        std::thread::Builder::new()
            .name("ritornello-scrub".to_owned())
            .spawn(move || thread.run(core))
            .map_err(|error| {
                Problem::retry(format!(
                    "no thread can be started for the scrub: send the request again later ({error})"
                ))
            })?;
        Ok(begun)
    }

    /// Ends all scrubs after their current run.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}

struct Thread {
    store: String,
    progress: Arc<Mutex<HashMap<String, ScrubProgress>>>,
    stopped: Arc<AtomicBool>,
    /// Whether `run` records how the scrub ended. If false, dropping this value records a failure.
    is_ended: bool,
}

impl Thread {
    fn run(mut self, core: Arc<StoreCore>) {
        let (mut total, mut is_stopped) = (0, false);
        let scrubbed = core.scrub_pass(&mut |found, runs| {
            total = runs;
            self.show(ScrubProgress::of("running", found, runs));
            is_stopped = self.stopped.load(Ordering::Relaxed);
            !is_stopped
        });
        // Hold the core no longer: a failed store is reopened only when no reference to its core is
        // left.
        drop(core);
        self.is_ended = true;
        match scrubbed {
            Ok(found) if is_stopped => self.show(ScrubProgress {
                problem: Some(Problem::retry(
                    "the service was stopped before the scrub was complete",
                )),
                ..ScrubProgress::of("failed", &found, total)
            }),
            Ok(found) => self.show(ScrubProgress::of("finished", &found, total)),
            Err(error) => self.show_failed(Problem::from(&error)),
        }
    }

    fn show_failed(&self, problem: Problem) {
        let known = self.progress.lock().get(&self.store).cloned();
        let reached = known.unwrap_or_else(|| ScrubProgress::new("failed"));
        self.show(ScrubProgress { state: "failed", problem: Some(problem), ..reached });
    }

    fn show(&self, progress: ScrubProgress) {
        self.progress.lock().insert(self.store.clone(), progress);
    }
}

impl Drop for Thread {
    /// Shows a scrub that panicked or was not started as failed: otherwise the scrub would seem to
    /// run, and no later scrub of the store could begin.
    fn drop(&mut self) {
        if !self.is_ended {
            self.show_failed(Problem::retry(
                "the scrub ended unexpectedly, or no thread could be started for it: see the log",
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scrub_that_ends_unexpectedly_has_failed() {
        let scrubs = Scrubs::default();
        let running = ScrubProgress::new("running");
        scrubs.progress.lock().insert("/kv".to_owned(), running);
        let thread = Thread {
            store: "/kv".to_owned(),
            progress: Arc::clone(&scrubs.progress),
            stopped: Arc::clone(&scrubs.stopped),
            is_ended: false,
        };
        drop(thread);
        let shown = scrubs.progress("/kv");
        assert_eq!(shown.state, "failed");
        assert!(shown.problem.unwrap().message().contains("unexpectedly"));
    }
}

//! Runs hidden from lookups: runs with extents in absent space, and the runs after them.

use crate::core::StoreCore;
use parking_lot::RwLock;
use ritornello_format::{PageHash, ScopeSlot};
use ritornello_index::{MatchedRun, RunId};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};

/// Why a run is hidden.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Some extents of the run are in absent space.
    Absent,
    /// The run follows a hidden run, directly or through other runs.
    Behind,
}

/// The runs hidden from lookups. In the lock order only the locks of
/// [`MissCauses`](crate::core::miss_causes::MissCauses) follow the lock on `runs`, which is held
/// only while `runs` is read or replaced.
#[derive(Debug, Default)]
pub(crate) struct Hidden {
    any: AtomicBool,
    runs: RwLock<HashMap<RunId, Cause>>,
}

impl Hidden {
    /// Hides the `absent` runs, and each run in `parents` (a map of runs to their parents) that has
    /// an absent ancestor.
    pub(crate) fn new(absent: &HashSet<RunId>, parents: &HashMap<RunId, RunId>) -> Self {
        let mut runs: HashMap<RunId, Cause> =
            absent.iter().map(|run| (*run, Cause::Absent)).collect();
        if !absent.is_empty() {
            let mut seen: HashSet<RunId> = HashSet::new();
            for &run in parents.keys() {
                // Collect `run` and its ancestors, up to the first that is known to be hidden or
                // was visited before.
                let mut way = Vec::new();
                let mut at = Some(run);
                while let Some(run) = at.filter(|run| !runs.contains_key(run) && seen.insert(*run))
                {
                    way.push(run);
                    at = parents.get(&run).copied();
                }
                if at.is_some_and(|run| runs.contains_key(&run)) {
                    runs.extend(way.into_iter().map(|run| (run, Cause::Behind)));
                }
            }
        }
        Self { any: AtomicBool::new(!runs.is_empty()), runs: RwLock::new(runs) }
    }

    /// Whether some extents of `run` are in absent space.
    pub(crate) fn is_absent(&self, run: RunId) -> bool {
        !self.is_empty() && self.runs.read().get(&run) == Some(&Cause::Absent)
    }

    /// Returns whether no run is hidden. Lookups check this flag before they take the lock.
    pub(crate) fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    pub(crate) fn contains(&self, run: RunId) -> bool {
        !self.is_empty() && self.runs.read().contains_key(&run)
    }

    pub(crate) fn len(&self) -> usize {
        self.runs.read().len()
    }

    pub(crate) fn list(&self, cause: Cause) -> Vec<RunId> {
        let runs = self.runs.read();
        runs.iter().filter(|(_, why)| **why == cause).map(|(run, _)| *run).collect()
    }

    pub(crate) fn replace(&self, other: Self) {
        let runs = other.runs.into_inner();
        let any = !runs.is_empty();
        *self.runs.write() = runs;
        self.any.store(any, Ordering::Release);
    }
}

impl StoreCore {
    /// Removes the hidden runs from the result of a lookup (`steps`, in the order of the keys). In
    /// a chained scope also removes all runs after the first hidden run, because a reader cannot
    /// use them.
    pub(crate) fn visible(&self, chained: bool, mut steps: Vec<MatchedRun>) -> Vec<MatchedRun> {
        if self.hidden.is_empty() {
            return steps;
        }
        let is_hidden = |step: &MatchedRun| self.hidden.contains(step.run);
        if chained {
            let end = steps.iter().position(is_hidden).unwrap_or(steps.len());
            steps.truncate(end);
        } else {
            steps.retain(|step| !is_hidden(step));
        }
        steps
    }

    pub(crate) fn is_hidden(&self, slot: ScopeSlot, page: PageHash) -> bool {
        !self.hidden.is_empty()
            && self.index.locate(slot, page).is_some_and(|(run, _)| self.hidden.contains(run))
    }
}

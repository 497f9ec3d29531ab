//! Contents of a measured index: the sequences of a workload, some of which share a prefix.

use clap::ValueEnum;
use ritornello_format::{PageHash, Place, Result, ScopeSlot};
use ritornello_index::synthetic::mix;
use ritornello_index::{NewRun, PrefixIndex};
use ritornello_sim::Trace;
use ritornello_sim::generate::TenStage;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Pages per sequence of all workloads except `one-prompt`; a probe asks for one sequence.
pub const SEQUENCE: usize = 256;
/// The scope of all pages.
pub const SLOT: ScopeSlot = ScopeSlot(0);
/// Maximum pages per run. Each insert adds one run.
const RUN: usize = 32;
/// Number of sequences in a family, which share a prefix of [`HEAD`] pages.
const FAMILY: u64 = 4;
const HEAD: usize = 128;
/// Number of distinct pages in the sequences of a family.
const FAMILY_PAGES: u64 = SEQUENCE as u64 + (FAMILY - 1) * (SEQUENCE - HEAD) as u64;

/// Pages of a request of `one-prompt`. All requests share the first [`PROMPT`] of these pages.
const REQUEST: usize = 20;
const PROMPT: usize = 16;

/// Sequences of pages, and the lengths of their runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workload {
    /// Sequences in runs of 32 pages; four at a time share their first half
    Chains,
    /// The sequences of `chains` in runs of 1 to 8 pages, as events of engines report pages
    KvEvents,
    /// Requests that put 20 pages each, of which the first 16 are the same for all requests
    OnePrompt,
    /// The ten-stage trace of `simulate --generate ten-stage`, scaled to the number of entries
    TenStage,
}

/// The sequences of a workload that has a given number of distinct pages.
#[derive(Debug)]
pub struct Load {
    workload: Workload,
    /// Number of distinct pages to insert.
    pub entries: u64,
    /// Number of sequences. The last sequences are inserted in part, or not at all, once `entries`
    /// pages are inserted.
    pub sequences: u64,
    /// For `ten-stage`: the requests, and for each the number of its leading blocks that earlier
    /// requests contain.
    trace: Option<(Trace, Vec<u32>)>,
    /// For `ten-stage`: the requests of each stage.
    stages: Vec<Range<usize>>,
}

impl Load {
    /// Returns the sequences of `workload` that contain at least `entries` distinct pages.
    ///
    /// # Errors
    /// Generator errors.
    pub fn new(workload: Workload, entries: u64) -> Result<Self> {
        if workload == Workload::OnePrompt {
            let own = (REQUEST - PROMPT) as u64;
            let sequences = entries.saturating_sub(PROMPT as u64).div_ceil(own).max(1);
            return Ok(Self { workload, entries, sequences, trace: None, stages: Vec::new() });
        }
        if workload != Workload::TenStage {
            let sequences = entries.div_ceil(FAMILY_PAGES) * FAMILY;
            return Ok(Self { workload, entries, sequences, trace: None, stages: Vec::new() });
        }
        // The warm-up inserts half of the pages, and each of the ten stages a tenth of the other
        // half. On average 59 % of the pages that a stage requests are new.
        let block = 64;
        let prompt_tokens = SEQUENCE as u64 * block;
        let warm_up_tokens = (entries * block / 2).max(prompt_tokens);
        let stage_tokens = (entries * block / 2 * 100 / 590 + prompt_tokens).max(prompt_tokens);
        let options =
            TenStage { warm_up_tokens, stage_tokens, prompt_tokens, ..TenStage::default() };
        let trace = options.generate()?;
        let mut seen = 0;
        let known = (0..trace.requests()).map(|at| {
            let blocks = trace.request(at);
            let known = blocks.iter().take_while(|block| **block < seen).count();
            seen = seen.max(blocks.iter().max().map_or(0, |last| last + 1));
            known as u32
        });
        let known: Vec<u32> = known.collect();
        Ok(Self {
            workload,
            entries,
            sequences: trace.requests() as u64,
            trace: Some((trace, known)),
            stages: options.stages().to_vec(),
        })
    }

    /// Returns the requests, for `ten-stage`.
    #[must_use]
    pub fn trace(&self) -> Option<&Trace> {
        self.trace.as_ref().map(|(trace, _)| trace)
    }

    /// Returns the range of sequences of each stage of `ten-stage`, without the warm-up, whose
    /// sequences come before the first stage. Other workloads have no stages.
    #[must_use]
    pub fn stages(&self) -> &[Range<usize>] {
        &self.stages
    }

    /// Returns the number of leading sequences that are inserted completely once `entries` pages
    /// are inserted. The result may be slightly smaller than this number, and is at least one.
    #[must_use]
    pub fn whole(&self) -> u64 {
        let Some((trace, known)) = &self.trace else {
            if self.workload == Workload::OnePrompt {
                return (self.sequences - 1).max(1);
            }
            return (self.entries / FAMILY_PAGES * FAMILY).max(1);
        };
        let mut pages = 0;
        let brings = |at: usize| trace.request(at).len() as u64 - u64::from(known[at]);
        let whole = (0..trace.requests()).take_while(|&at| {
            pages += brings(at);
            pages <= self.entries
        });
        whole.count().max(1) as u64
    }

    /// Returns the number of pages put. For `one-prompt` this includes the shared pages of every
    /// request, although the index has them already.
    #[must_use]
    pub fn offers(&self) -> u64 {
        match self.workload {
            Workload::OnePrompt => self.sequences * REQUEST as u64,
            _ => self.entries,
        }
    }

    /// Returns the approximate number of pages per run.
    #[must_use]
    pub fn run_pages(&self) -> u32 {
        match self.workload {
            Workload::Chains => RUN as u32,
            Workload::KvEvents => 4,
            Workload::OnePrompt => (REQUEST - PROMPT) as u32,
            Workload::TenStage => RUN as u32 / 2,
        }
    }

    /// Returns the pages of a sequence, and how many of its leading pages earlier sequences have.
    #[must_use]
    pub fn sequence(&self, number: u64) -> (Vec<PageHash>, usize) {
        if let Some((trace, known)) = &self.trace {
            let at = number as usize % trace.requests().max(1);
            let round = number / trace.requests().max(1) as u64;
            let blocks = trace.request(at).iter();
            let pages = blocks.map(|block| hash(round << 40 | u64::from(*block))).collect();
            return (pages, known[at] as usize);
        }
        if self.workload == Workload::OnePrompt {
            let page = |at: usize| {
                let owner = if at < PROMPT { 0 } else { number + 1 };
                hash(owner << 16 | at as u64)
            };
            return ((0..REQUEST).map(page).collect(), if number == 0 { 0 } else { PROMPT });
        }
        let first = number - number % FAMILY;
        let page = |at: usize| {
            let owner = if at < HEAD { first } else { number };
            hash(owner << 16 | at as u64)
        };
        ((0..SEQUENCE).map(page).collect(), if number == first { 0 } else { HEAD })
    }

    /// Inserts the new pages of a sequence, at most `left`, run by run. After each run, calls
    /// `done` with that run's number of pages. Returns the number of inserted pages.
    ///
    /// # Errors
    /// Index errors, and errors of `done`.
    pub fn insert<E: From<ritornello_format::Error>>(
        &self,
        index: &dyn PrefixIndex,
        number: u64,
        left: u64,
        mut done: impl FnMut(u64) -> std::result::Result<(), E>,
    ) -> std::result::Result<u64, E> {
        let (pages, mut known) = self.sequence(number);
        if self.workload == Workload::OnePrompt {
            // Ask the index how many leading pages of the request it has, as a put of the whole
            // request does.
            known = index.probe(SLOT, &pages);
        }
        let end =
            pages.len().min(known.saturating_add(usize::try_from(left).unwrap_or(usize::MAX)));
        let mut at = known;
        while at < end {
            let length = match self.workload {
                Workload::KvEvents => 1 + (mix(number << 16 | at as u64) % 8) as usize,
                Workload::Chains | Workload::OnePrompt | Workload::TenStage => RUN,
            };
            let to = end.min(at + length);
            let place = Place { generation: number << 16 | (at as u64 + 1), ..Place::default() };
            index.insert(&NewRun {
                scope: SLOT,
                chained: true,
                parent: at.checked_sub(1).map(|before| pages[before]),
                pages: &pages[at..to],
                place: &place,
                recency: number,
            })?;
            done((to - at) as u64)?;
            at = to;
        }
        Ok((end - known.min(end)) as u64)
    }
}

fn hash(page: u64) -> PageHash {
    let low = mix(page ^ 0x7269_746f_726e_656c);
    PageHash((u128::from(mix(low)) << 64 | u128::from(low | 1)).to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_format::Error;
    use ritornello_index::MemoryIndex;

    #[test]
    fn workloads_insert_given_number_of_pages_and_find_them() {
        for &workload in Workload::value_variants() {
            let load = Load::new(workload, 20_000).unwrap();
            let index = MemoryIndex::new();
            let mut left = load.entries;
            let mut whole = 0;
            for number in 0..load.sequences {
                let some = load.insert(&index, number, left, |_| Ok::<(), Error>(())).unwrap();
                left -= some;
                whole = if left > 0 { number + 1 } else { whole };
            }
            assert_eq!((left, index.stats().pages), (0, 20_000), "{workload:?}");
            assert!(load.whole() <= whole && load.whole() * 10 >= whole * 9, "{workload:?}");
            for number in 0..whole {
                let (pages, _) = load.sequence(number);
                assert_eq!(index.probe(SLOT, &pages), pages.len(), "{workload:?} {number}");
            }
        }
    }
}

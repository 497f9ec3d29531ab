//! Which blocks are there, in which runs: what the store's index knows, without its scopes.

use crate::Trace;
use ritornello_format::{Error, Result};
use ritornello_index::RunId;
use ritornello_store::eviction::{Holdings, Used};

/// No run.
const NONE: u32 = u32::MAX;

/// The blocks that are there.
///
/// Invariant: a block that is there has its predecessor there (closure): [`SimIndex::cut`]
/// refuses what would break it, so a policy that is not leaf first is found out.
pub(crate) struct SimIndex<'t> {
    trace: &'t Trace,
    /// By block: its run, or [`NONE`], and its page there.
    locations: Vec<(u32, u32)>,
    /// By block: runs that hang from it.
    children: Vec<u32>,
    /// By the run's name; names are not used again.
    runs: Vec<Run>,
    pins: u64,
}

/// Consecutive blocks of one request.
struct Run {
    /// Position of its first block among the references of the trace.
    first: usize,
    pages: u32,
    /// Whether it hangs from a block.
    has_parent: bool,
    /// The round of pinning it takes part in.
    pinned: u64,
}

impl<'t> SimIndex<'t> {
    pub(crate) fn new(trace: &'t Trace) -> Self {
        let blocks = trace.footprint();
        Self {
            trace,
            locations: vec![(NONE, 0); blocks],
            children: vec![0; blocks],
            runs: Vec::new(),
            pins: 0,
        }
    }

    /// Walks the leading blocks that are there, pins their runs and no others, and returns the
    /// blocks' number. `path` becomes the runs.
    pub(crate) fn walk(&mut self, blocks: &[u32], path: &mut Vec<Used>) -> usize {
        self.pins += 1;
        path.clear();
        let mut last = NONE;
        for (at, block) in blocks.iter().enumerate() {
            let (run, page) = self.locations[*block as usize];
            if run == NONE {
                return at;
            }
            if run == last
                && let Some(used) = path.last_mut()
            {
                used.pages = page + 1;
            } else {
                path.push(Used { run: RunId(u64::from(run)), pages: page + 1 });
                self.runs[run as usize].pinned = self.pins;
                last = run;
            }
        }
        blocks.len()
    }

    /// Inserts the `pages` blocks at position `first` of the trace's references, none of which is
    /// there, behind `before`, which is. Returns the run and what it hangs from.
    pub(crate) fn insert(
        &mut self,
        first: usize,
        pages: u32,
        before: Option<u32>,
    ) -> (RunId, Option<(RunId, u32)>) {
        // Four billion runs do not fit into memory.
        let run = self.runs.len() as u32;
        self.runs.push(Run { first, pages, has_parent: before.is_some(), pinned: 0 });
        for (page, block) in (0..).zip(&self.trace.blocks()[first..first + pages as usize]) {
            self.locations[*block as usize] = (run, page);
        }
        let parent = before.map(|block| {
            self.children[block as usize] += 1;
            let (run, page) = self.locations[block as usize];
            (RunId(u64::from(run)), page)
        });
        (RunId(u64::from(run)), parent)
    }

    /// Cuts a run after `keep` pages. Returns how many went; none if it was that short already.
    ///
    /// # Errors
    /// `Fatal` if another run hangs from one of them.
    pub(crate) fn cut(&mut self, run: RunId, keep: u32) -> Result<u32> {
        let Some(entry) = self.runs.get_mut(run.0 as usize) else { return Ok(0) };
        let Run { first, pages, has_parent, .. } = *entry;
        if pages <= keep {
            return Ok(0);
        }
        entry.pages = keep;
        let gone = first + keep as usize..first + pages as usize;
        for &block in &self.trace.blocks()[gone] {
            if self.children[block as usize] > 0 {
                return Err(Error::fatal("the policy cut a page that others hang from")
                    .with("run", run.0)
                    .with("keep", keep));
            }
            self.locations[block as usize].0 = NONE;
        }
        if keep == 0 && has_parent {
            // In the request that brought the run, the block it hangs from stands before it.
            self.children[self.trace.blocks()[first - 1] as usize] -= 1;
        }
        Ok(pages - keep)
    }
}

impl Holdings for SimIndex<'_> {
    fn is_pinned(&self, run: RunId) -> bool {
        self.runs.get(run.0 as usize).is_some_and(|run| run.pinned == self.pins)
    }

    fn page_key(&self, run: RunId, page: u32) -> u64 {
        let run = self.runs.get(run.0 as usize).filter(|run| page < run.pages);
        run.map_or(0, |run| self.trace.key(self.trace.blocks()[run.first + page as usize]))
    }
}

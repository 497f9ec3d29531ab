//! Detection of overlapping memory before it is written.

/// A span of memory that belongs to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct MemoryRange {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    pub(crate) page: usize,
}

/// Returns two pages that share a byte, if any (they may be the same page twice).
pub(crate) fn overlap(mut ranges: Vec<MemoryRange>) -> Option<(usize, usize)> {
    ranges.retain(|span| span.bytes > 0);
    ranges.sort_unstable();
    ranges
        .windows(2)
        .find(|pair| pair[0].address + pair[0].bytes > pair[1].address)
        .map(|pair| (pair[0].page.min(pair[1].page), pair[0].page.max(pair[1].page)))
}

//! Windows: consecutive pages of a load or save that pass through slots together.

use std::ops::Range;

/// How the pages of one load or save are divided into windows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Windows {
    pages: usize,
    /// Pages of each window, except the last, which may be shorter.
    each: usize,
}

impl Windows {
    /// Windows of `pages` pages whose slots take `slot_bytes` bytes each. A window has at least one
    /// page, at most `pages_max` pages and, if it has several, at most `window_bytes` bytes.
    pub(crate) fn new(
        pages: usize,
        slot_bytes: usize,
        window_bytes: usize,
        pages_max: usize,
    ) -> Self {
        Self { pages, each: (window_bytes / slot_bytes.max(1)).clamp(1, pages_max) }
    }

    /// Number of windows.
    pub(crate) fn count(&self) -> usize {
        self.pages.div_ceil(self.each)
    }

    /// The pages of window `number`.
    pub(crate) fn pages(&self, number: usize) -> Range<usize> {
        let first = number * self.each;
        first..self.pages.min(first + self.each)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_have_each_page_once_and_keep_their_limits() {
        for (pages, slot_bytes, window_bytes) in
            [(1, 4096, 1 << 20), (1000, 2 << 20, 32 << 20), (7, 8 << 20, 2 << 20), (0, 4096, 0)]
        {
            let windows = Windows::new(pages, slot_bytes, window_bytes, 15);
            let all: Vec<usize> = (0..windows.count()).flat_map(|n| windows.pages(n)).collect();
            assert_eq!(all, (0..pages).collect::<Vec<_>>());
            for number in 0..windows.count() {
                let pages = windows.pages(number).len();
                assert!(pages <= 15 && (pages == 1 || pages * slot_bytes <= window_bytes));
            }
        }
    }
}

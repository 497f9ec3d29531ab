//! Windows: consecutive pages of a load or save that pass through slots together.

use std::ops::Range;

/// Maximum bytes of a window. The first window's read and the last window's copy overlap nothing, so
/// windows are short; a read of this length still keeps a disk busy.
const WINDOW_BYTES: usize = 32 << 20;
/// Minimum number of windows that the pinned memory holds: half are filled while half are copied.
const WINDOWS: usize = 8;

/// How pages are divided into windows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Windows {
    pages: usize,
    each: usize,
}

impl Windows {
    /// Windows of `pages` pages, whose slots take `slot_bytes` bytes each of an arena of `capacity`
    /// bytes.
    pub(crate) fn new(pages: usize, slot_bytes: usize, capacity: usize, pages_max: usize) -> Self {
        let bytes = (capacity / WINDOWS).min(WINDOW_BYTES);
        Self { pages, each: (bytes / slot_bytes.max(1)).clamp(1, pages_max) }
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
    fn windows_cover_all_pages_once_and_fit_the_arena() {
        for (pages, slot_bytes, capacity) in
            [(1, 4096, 2 << 20), (1000, 2 << 20, 1 << 30), (7, 8 << 20, 16 << 20), (0, 4096, 0)]
        {
            let windows = Windows::new(pages, slot_bytes, capacity, 8192);
            let all: Vec<usize> = (0..windows.count()).flat_map(|n| windows.pages(n)).collect();
            assert_eq!(all, (0..pages).collect::<Vec<_>>());
            for number in 0..windows.count() {
                let bytes = windows.pages(number).len() * slot_bytes;
                assert!(bytes <= slot_bytes.max(capacity / WINDOWS), "{pages} pages: {bytes}");
            }
        }
    }
}

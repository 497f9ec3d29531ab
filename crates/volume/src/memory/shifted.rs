//! A source behind pages that have no bytes.

use super::{Fragment, PageSource};

/// The pages of a source, numbered from `by` on. The pages before have no fragments.
#[derive(Clone, Copy)]
pub struct Shifted<'a> {
    of: &'a dyn PageSource,
    by: usize,
}

impl<'a> Shifted<'a> {
    /// Page 0 of `of` becomes page `by`.
    #[must_use]
    pub fn new(of: &'a dyn PageSource, by: usize) -> Self {
        Self { of, by }
    }
}

// SAFETY: all fragments are those of `of`, which promises the same for them; a page before `by` has
// none, as a page that does not exist.
unsafe impl PageSource for Shifted<'_> {
    fn len(&self) -> usize {
        self.by + self.of.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>) {
        if let Some(page) = page.checked_sub(self.by) {
            self.of.fragments(page, out);
        }
    }
    fn padded(&self, page: usize) -> bool {
        page.checked_sub(self.by).is_some_and(|page| self.of.padded(page))
    }
}

impl std::fmt::Debug for Shifted<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shifted").field("by", &self.by).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::OwnedPages;

    #[test]
    fn pages_before_the_shift_have_no_bytes() {
        let pages = OwnedPages::new(vec![vec![1; 10], vec![2; 20]]);
        let shifted = Shifted::new(&pages, 3);
        let lengths = |page| {
            let mut found = Vec::new();
            shifted.fragments(page, &mut found);
            found.iter().map(Fragment::len).collect::<Vec<_>>()
        };
        assert_eq!(shifted.len(), 5);
        assert_eq!((2..6).map(lengths).collect::<Vec<_>>(), [vec![], vec![10], vec![20], vec![]]);
    }
}

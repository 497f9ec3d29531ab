//! A source whose page numbers start at an offset.

use super::{Fragment, PageSource};

/// The pages of a source, numbered starting at `offset`. Pages before `offset` have no bytes.
#[derive(Clone, Copy)]
pub struct OffsetPages<'a> {
    of: &'a dyn PageSource,
    offset: usize,
}

impl<'a> OffsetPages<'a> {
    /// Page 0 of `of` becomes page `offset`.
    #[must_use]
    pub fn new(of: &'a dyn PageSource, offset: usize) -> Self {
        Self { of, offset }
    }
}

// SAFETY: all fragments belong to `of`, which makes the same promises; a page before `offset` has
// no fragments, like a page that does not exist.
unsafe impl PageSource for OffsetPages<'_> {
    fn len(&self) -> usize {
        self.offset + self.of.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>) {
        if let Some(page) = page.checked_sub(self.offset) {
            self.of.fragments(page, out);
        }
    }
    fn without_bytes(&self) -> usize {
        self.offset
    }
    fn padded(&self, page: usize) -> bool {
        page.checked_sub(self.offset).is_some_and(|page| self.of.padded(page))
    }
}

impl std::fmt::Debug for OffsetPages<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OffsetPages").field("offset", &self.offset).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page_memory::OwnedPages;

    #[test]
    fn pages_before_the_offset_have_no_bytes() {
        let pages = OwnedPages::new(vec![vec![1; 10], vec![2; 20]]);
        let pages_at_offset = OffsetPages::new(&pages, 3);
        let lengths = |page| {
            let mut found = Vec::new();
            pages_at_offset.fragments(page, &mut found);
            found.iter().map(Fragment::len).collect::<Vec<_>>()
        };
        assert_eq!(pages_at_offset.len(), 5);
        assert_eq!((2..6).map(lengths).collect::<Vec<_>>(), [vec![], vec![10], vec![20], vec![]]);
    }
}

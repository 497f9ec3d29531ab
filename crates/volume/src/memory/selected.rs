//! Some pages of somebody's target: to read each stretch from where it is, and to pass on what came.

use super::{Fragment, FragmentMut, PageSource, PageTarget};

/// Pages `pages` of `of`, whose numbers rise.
#[derive(Clone, Copy)]
pub struct SelectedPages<'a> {
    of: &'a dyn PageTarget,
    pages: &'a [usize],
}

impl<'a> SelectedPages<'a> {
    /// The pages with these numbers, none if they do not rise.
    #[must_use]
    pub fn new(of: &'a dyn PageTarget, pages: &'a [usize]) -> Self {
        let rise = pages.windows(2).all(|two| two[0] < two[1]);
        Self { of, pages: if rise { pages } else { &[] } }
    }

    /// What was read to these pages, to be copied from before the call that owns `of` returns.
    #[must_use]
    pub fn filled(self) -> impl PageSource + 'a {
        Filled(self)
    }
}

// SAFETY: fragments are those of `of`, which promises the same for them. Its pages do not overlap, and
// none is picked twice: their numbers rise.
unsafe impl PageTarget for SelectedPages<'_> {
    fn len(&self) -> usize {
        self.pages.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<FragmentMut>) {
        if let Some(number) = self.pages.get(page) {
            self.of.fragments(*number, out);
        }
    }
}

struct Filled<'a>(SelectedPages<'a>);

// SAFETY: memory of a target may be read by whom it was handed to, until that call returns, which
// outlives `self`: it borrows the target from there. It is initialised, as all memory that callers
// lend for reading to is.
unsafe impl PageSource for Filled<'_> {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>) {
        let mut lent = Vec::new();
        PageTarget::fragments(&self.0, page, &mut lent);
        // SAFETY: as above.
        out.extend(lent.iter().map(|f| unsafe { Fragment::new(f.as_ptr(), f.len()) }));
    }
}

impl std::fmt::Debug for SelectedPages<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SelectedPages").field("pages", &self.pages).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::OwnedPagesMut;

    fn lengths(pages: &dyn PageTarget) -> Vec<usize> {
        let mut found = Vec::new();
        (0..pages.len()).for_each(|page| pages.fragments(page, &mut found));
        found.iter().map(FragmentMut::len).collect()
    }

    #[test]
    fn pages_are_picked_by_number_and_none_twice() {
        let all = OwnedPagesMut::new(vec![vec![1; 10], vec![2; 20], vec![3; 30]]);
        let picked = SelectedPages::new(&all, &[0, 2, 9]);
        assert_eq!((PageTarget::len(&picked), lengths(&picked)), (3, vec![10, 30]));
        for wrong in [&[1, 1][..], &[2, 0]] {
            assert!(SelectedPages::new(&all, wrong).is_empty());
        }
        let (filled, mut found) = (picked.filled(), Vec::new());
        filled.fragments(1, &mut found);
        assert_eq!((filled.len(), found.len(), found[0].len()), (3, 1, 30));
        drop(filled);
        assert_eq!(all.into_inner()[1], [2; 20]);
    }
}

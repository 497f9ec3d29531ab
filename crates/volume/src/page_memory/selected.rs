//! A subset of a target's pages. A cache reads each subset from the tier that has it, and may then
//! write it to another tier.

use super::{Fragment, FragmentMut, PageSource, PageTarget};

/// The pages of `of` whose numbers are in `pages`, in ascending order.
#[derive(Clone, Copy)]
pub struct SelectedPages<'a> {
    of: &'a dyn PageTarget,
    pages: &'a [usize],
}

impl<'a> SelectedPages<'a> {
    /// Selects `pages`, or no page if the numbers do not strictly ascend.
    #[must_use]
    pub fn new(of: &'a dyn PageTarget, pages: &'a [usize]) -> Self {
        let rise = pages.windows(2).all(|two| two[0] < two[1]);
        Self { of, pages: if rise { pages } else { &[] } }
    }

    /// Returns the selected pages as a source, to be used after all of them were read, and before
    /// the call that received `of` returns.
    #[must_use]
    pub fn filled(self) -> impl PageSource + 'a {
        Filled(self)
    }
}

// SAFETY: the fragments belong to `of`, which makes the same promises. Its pages do not overlap,
// and strictly ascending numbers select no page twice.
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

// SAFETY: a call that receives a target may read the target's memory until the call returns, and
// [`SelectedPages::filled`] requires that `self` is not used afterwards. The memory of a target is
// readable and initialised.
unsafe impl PageSource for Filled<'_> {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>) {
        let mut lent = Vec::new();
        PageTarget::fragments(&self.0, page, &mut lent);
        // SAFETY: the fragments belong to the target, which promises that they are readable.
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
    use crate::page_memory::OwnedPagesMut;

    fn lengths(pages: &dyn PageTarget) -> Vec<usize> {
        let mut found = Vec::new();
        (0..pages.len()).for_each(|page| pages.fragments(page, &mut found));
        found.iter().map(FragmentMut::len).collect()
    }

    #[test]
    fn pages_are_selected_by_ascending_number() {
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

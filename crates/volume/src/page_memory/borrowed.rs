//! Pages in borrowed slices, for calls that return before the borrow ends.

use super::{Fragment, FragmentMut, PageSource, PageTarget};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// A source of pages in borrowed slices.
#[derive(Debug)]
pub struct BorrowedPages<'a> {
    fragments: Vec<Fragment>,
    pages: Vec<Range<usize>>,
    borrow: PhantomData<&'a [u8]>,
}

impl<'a> BorrowedPages<'a> {
    /// One slice per page.
    #[must_use]
    pub fn new(pages: &[&'a [u8]]) -> Self {
        Self::collect(pages.iter().map(std::slice::from_ref))
    }

    /// Any number of slices per page.
    #[must_use]
    pub fn fragmented(pages: &[Vec<&'a [u8]>]) -> Self {
        Self::collect(pages.iter().map(Vec::as_slice))
    }

    fn collect<'p>(source: impl Iterator<Item = &'p [&'a [u8]]>) -> Self
    where
        'a: 'p,
    {
        let (mut fragments, mut pages) = (Vec::new(), Vec::new());
        for page in source {
            let from = fragments.len();
            // SAFETY: borrowed for `'a`, which `self` does not outlive.
            let parts = page.iter().map(|part| unsafe { Fragment::new(part.as_ptr(), part.len()) });
            fragments.extend(parts);
            pages.push(from..fragments.len());
        }
        Self { fragments, pages, borrow: PhantomData }
    }
}

// SAFETY: the slices are borrowed for `'a`, shared, and initialised.
unsafe impl PageSource for BorrowedPages<'_> {
    fn len(&self) -> usize {
        self.pages.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>) {
        if let Some(range) = self.pages.get(page) {
            out.extend_from_slice(&self.fragments[range.clone()]);
        }
    }
}

/// A target of pages in borrowed slices.
///
/// Each page is handed out once: a second read of the same page finds no memory for it. Two reads
/// therefore never write to the same memory, and the constructor is safe.
#[derive(Debug)]
pub struct BorrowedPagesMut<'a> {
    fragments: Vec<FragmentMut>,
    pages: Vec<(Range<usize>, AtomicBool)>,
    borrow: PhantomData<&'a mut [u8]>,
}

impl<'a> BorrowedPagesMut<'a> {
    /// One slice per page.
    #[must_use]
    pub fn new<'b: 'a>(pages: &'a mut [&'b mut [u8]]) -> Self {
        Self::collect(pages.iter_mut().map(std::slice::from_mut))
    }

    /// Any number of slices per page.
    #[must_use]
    pub fn fragmented<'b: 'a>(pages: &'a mut [Vec<&'b mut [u8]>]) -> Self {
        Self::collect(pages.iter_mut().map(Vec::as_mut_slice))
    }

    fn collect<'b: 'a>(source: impl Iterator<Item = &'a mut [&'b mut [u8]]>) -> Self {
        let (mut fragments, mut pages) = (Vec::new(), Vec::new());
        for page in source {
            let from = fragments.len();
            for part in page.iter_mut() {
                // SAFETY: mutably borrowed for `'a`, which `self` does not outlive.
                fragments.push(unsafe { FragmentMut::new(part.as_mut_ptr(), part.len()) });
            }
            pages.push((from..fragments.len(), AtomicBool::new(false)));
        }
        Self { fragments, pages, borrow: PhantomData }
    }
}

// SAFETY: the slices are mutably borrowed for `'a`, so they are distinct and exclusive, and
// `fragments` hands out each page once.
unsafe impl PageTarget for BorrowedPagesMut<'_> {
    fn len(&self) -> usize {
        self.pages.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<FragmentMut>) {
        if let Some((range, given)) = self.pages.get(page)
            && !given.swap(true, Ordering::AcqRel)
        {
            out.extend_from_slice(&self.fragments[range.clone()]);
        }
    }
}

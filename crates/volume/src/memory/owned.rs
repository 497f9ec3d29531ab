//! Pages that own their bytes.

use super::{Fragment, FragmentMut, PageSource, PageTarget};
use std::ptr::NonNull;

/// Pages in vectors of their own.
#[derive(Debug, Default)]
pub struct OwnedPages(Vec<Vec<u8>>);

impl OwnedPages {
    /// One vector a page.
    #[must_use]
    pub fn new(pages: Vec<Vec<u8>>) -> Self {
        Self(pages)
    }

    /// The pages back.
    #[must_use]
    pub fn into_inner(self) -> Vec<Vec<u8>> {
        self.0
    }
}

impl From<Vec<Vec<u8>>> for OwnedPages {
    fn from(pages: Vec<Vec<u8>>) -> Self {
        Self(pages)
    }
}

// SAFETY: the vectors are not handed out otherwise while `self` is borrowed, and do not move.
unsafe impl PageSource for OwnedPages {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>) {
        if let Some(bytes) = self.0.get(page) {
            // SAFETY: the vector lives as long as `self`.
            out.push(unsafe { Fragment::new(bytes.as_ptr(), bytes.len()) });
        }
    }
}

/// Pages to read to, in vectors of their own: for reads that outlive a borrow. What was read is had
/// when nobody else holds them any more.
#[derive(Debug)]
pub struct OwnedPagesMut {
    pages: Vec<Vec<u8>>,
    /// Where they are: taken once, so that a page is only ever reached through this.
    starts: Vec<NonNull<u8>>,
}

// SAFETY: the pointers lead to the vectors, which belong to this value.
unsafe impl Send for OwnedPagesMut {}
// SAFETY: a shared reference gives access through `PageTarget` only, whose callers keep apart.
unsafe impl Sync for OwnedPagesMut {}

impl OwnedPagesMut {
    /// These pages, whose bytes are there until something is read.
    #[must_use]
    pub fn new(mut pages: Vec<Vec<u8>>) -> Self {
        let start = |page: &mut Vec<u8>| NonNull::new(page.as_mut_ptr());
        let starts = pages.iter_mut().map(|page| start(page).unwrap_or(NonNull::dangling()));
        Self { starts: starts.collect(), pages }
    }

    /// The pages back.
    #[must_use]
    pub fn into_inner(self) -> Vec<Vec<u8>> {
        self.pages
    }
}

// SAFETY: the vectors do not move, grow or go while `self` lives, and nobody else reaches them: there
// is no other way to their bytes than by taking `self` apart.
unsafe impl PageTarget for OwnedPagesMut {
    fn len(&self) -> usize {
        self.pages.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<FragmentMut>) {
        if let (Some(start), Some(bytes)) = (self.starts.get(page), self.pages.get(page)) {
            // SAFETY: as above.
            out.push(unsafe { FragmentMut::new(start.as_ptr(), bytes.len()) });
        }
    }
}

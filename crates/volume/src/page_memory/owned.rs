//! Pages that own their bytes.

use super::{Fragment, FragmentMut, PageSource, PageTarget};
use std::ptr::NonNull;

/// A source of pages, one vector each.
#[derive(Debug, Default)]
pub struct OwnedPages(Vec<Vec<u8>>);

impl OwnedPages {
    /// One vector per page.
    #[must_use]
    pub fn new(pages: Vec<Vec<u8>>) -> Self {
        Self(pages)
    }

    /// Returns the pages.
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

// SAFETY: no method changes, moves or drops a vector while `self` is borrowed.
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

/// A target of pages, one vector each, for reads that outlive a borrow. Once no read holds a
/// reference to the target, its owner takes the bytes by [`OwnedPagesMut::into_inner`].
#[derive(Debug)]
pub struct OwnedPagesMut {
    pages: Vec<Vec<u8>>,
    /// The addresses of the vectors, taken once, so that page bytes are only ever accessed through
    /// these pointers.
    starts: Vec<NonNull<u8>>,
}

// SAFETY: the pointers point into the vectors, which belong to this value.
unsafe impl Send for OwnedPagesMut {}
// SAFETY: a shared reference gives access through `PageTarget` only, whose callers hand out each
// page to one read at a time.
unsafe impl Sync for OwnedPagesMut {}

impl OwnedPagesMut {
    /// A target with `pages`. The bytes of the pages stay until a read overwrites them.
    #[must_use]
    pub fn new(mut pages: Vec<Vec<u8>>) -> Self {
        let start = |page: &mut Vec<u8>| NonNull::new(page.as_mut_ptr());
        let starts = pages.iter_mut().map(|page| start(page).unwrap_or(NonNull::dangling()));
        Self { starts: starts.collect(), pages }
    }

    /// Returns the pages.
    #[must_use]
    pub fn into_inner(self) -> Vec<Vec<u8>> {
        self.pages
    }
}

// SAFETY: the vectors do not move, grow or drop while `self` lives, and their bytes are reachable
// otherwise only by consuming `self`.
unsafe impl PageTarget for OwnedPagesMut {
    fn len(&self) -> usize {
        self.pages.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<FragmentMut>) {
        if let (Some(start), Some(bytes)) = (self.starts.get(page), self.pages.get(page)) {
            // SAFETY: the vector lives as long as `self`, and the pointer to its bytes was taken
            // when `self` was made.
            out.push(unsafe { FragmentMut::new(start.as_ptr(), bytes.len()) });
        }
    }
}

//! Pages that own their bytes.

use super::{Fragment, PageSource};

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

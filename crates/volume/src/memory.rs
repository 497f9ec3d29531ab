//! Memory that pages come from and go to, as the caller holds it: any number of fragments a page.

mod borrowed;
mod offset;
mod owned;
mod selected;

pub use borrowed::{BorrowedPages, BorrowedPagesMut};
pub use offset::OffsetPages;
pub use owned::{OwnedPages, OwnedPagesMut};
pub use selected::SelectedPages;

/// Some consecutive bytes to read from.
#[derive(Clone, Copy, Debug)]
pub struct Fragment {
    ptr: *const u8,
    len: usize,
}

// SAFETY: a fragment is an address and a length. Whoever made it promised (see `Fragment::new`)
// that the bytes may be read from any thread.
unsafe impl Send for Fragment {}
// SAFETY: as above.
unsafe impl Sync for Fragment {}

impl Fragment {
    /// The `len` bytes at `ptr`.
    ///
    /// # Safety
    /// They are initialised and may be read, from any thread, for as long as the fragment is used.
    #[must_use]
    pub const unsafe fn new(ptr: *const u8, len: usize) -> Self {
        Self { ptr, len }
    }
    /// First byte.
    #[must_use]
    pub const fn as_ptr(&self) -> *const u8 {
        self.ptr
    }
    /// Number of bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }
    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Some consecutive bytes to write to.
#[derive(Clone, Copy, Debug)]
pub struct FragmentMut {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: a fragment is an address and a length. Whoever made it promised (see `FragmentMut::new`)
// that the bytes may be written from any thread.
unsafe impl Send for FragmentMut {}
// SAFETY: as above.
unsafe impl Sync for FragmentMut {}

impl FragmentMut {
    /// The `len` bytes at `ptr`.
    ///
    /// # Safety
    /// They may be read and written, from any thread, for as long as the fragment is used, and
    /// nobody else touches them meanwhile.
    #[must_use]
    pub const unsafe fn new(ptr: *mut u8, len: usize) -> Self {
        Self { ptr, len }
    }
    /// First byte.
    #[must_use]
    pub const fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }
    /// Number of bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }
    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Pages to write.
///
/// # Safety
/// The fragments of a page are initialised and valid for reads from any thread for as long as the
/// value lives; together they are as long as the page. If [`PageSource::padded`] says so of a page,
/// the bytes from the end of its last fragment to the next multiple of 4 KiB may be read as well, and
/// are zero. A page whose bytes change while it is written in place is a miss later. One that is copied
/// or encoded on its way is stored as it was found, which may be partly old and partly new: whoever
/// changes a page during its put must not ask for it again.
pub unsafe trait PageSource: Send + Sync {
    /// Number of pages.
    fn len(&self) -> usize;
    /// Appends the fragments of page `page`, in order; nothing if there is no such page.
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>);
    /// Whether a page is padded in memory as it is on disk, so that it is written from where it is to
    /// its last byte.
    fn padded(&self, _page: usize) -> bool {
        false
    }
    /// Whether there are no pages.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Where pages are read to.
///
/// # Safety
/// The fragments of a page are valid for reads and writes from any thread for as long as the value
/// lives, and from the moment they are handed out nobody else reads or writes them until the call
/// they were handed to returns; together they are as long as the page. Fragments of different pages
/// do not overlap. Of sections that a call is asked for and that have come, others may read.
pub unsafe trait PageTarget: Send + Sync {
    /// Number of pages.
    fn len(&self) -> usize;
    /// Appends the fragments of page `page`, in order; nothing if there is no such page, or if it
    /// is in use.
    fn fragments(&self, page: usize, out: &mut Vec<FragmentMut>);
    /// Whether there are no pages.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

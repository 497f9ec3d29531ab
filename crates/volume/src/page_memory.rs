//! The caller's memory of pages: each page is any number of fragments.

mod borrowed;
mod offset;
mod owned;
mod selected;

pub use borrowed::{BorrowedPages, BorrowedPagesMut};
pub use offset::OffsetPages;
pub use owned::{OwnedPages, OwnedPagesMut};
pub use selected::SelectedPages;

/// A readable range of memory.
#[derive(Clone, Copy, Debug)]
pub struct Fragment {
    ptr: *const u8,
    len: usize,
}

// SAFETY: a fragment is an address and a length. The caller of `Fragment::new` promised that the
// bytes are readable from any thread.
unsafe impl Send for Fragment {}
// SAFETY: as for `Send`.
unsafe impl Sync for Fragment {}

impl Fragment {
    /// The `len` bytes at `ptr`.
    ///
    /// # Safety
    /// The bytes are initialised and readable from any thread for as long as the fragment is used.
    #[must_use]
    pub const unsafe fn new(ptr: *const u8, len: usize) -> Self {
        Self { ptr, len }
    }
    /// Address of the first byte.
    #[must_use]
    pub const fn as_ptr(&self) -> *const u8 {
        self.ptr
    }
    /// Number of bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }
    /// Whether the fragment has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// A writable range of memory.
#[derive(Clone, Copy, Debug)]
pub struct FragmentMut {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: a fragment is an address and a length. The caller of `FragmentMut::new` promised that the
// bytes are writable from any thread.
unsafe impl Send for FragmentMut {}
// SAFETY: as for `Send`.
unsafe impl Sync for FragmentMut {}

impl FragmentMut {
    /// The `len` bytes at `ptr`.
    ///
    /// # Safety
    /// The bytes are readable and writable from any thread for as long as the fragment is used, and
    /// no other code accesses them in that time.
    #[must_use]
    pub const unsafe fn new(ptr: *mut u8, len: usize) -> Self {
        Self { ptr, len }
    }
    /// Address of the first byte.
    #[must_use]
    pub const fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }
    /// Number of bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }
    /// Whether the fragment has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// The pages of a put.
///
/// # Safety
/// The fragments of a page are initialised and valid for reads from any thread for as long as the
/// value lives; together they are as long as the page, except that a page without bytes
/// ([`PageSource::without_bytes`]) has none. If [`PageSource::padded`] returns true for a
/// page, the bytes from the end of its last fragment to the next multiple of 4 KiB are readable as
/// well, and are zero.
///
/// If the bytes of a page change while the kernel reads them from this memory, a later read of the
/// page usually misses. If they change while the page is copied or encoded, a mixture of old and
/// new bytes is stored under a valid checksum. A caller that changes a page during the put must
/// therefore not get this page from the store.
pub unsafe trait PageSource: Send + Sync {
    /// Number of pages.
    fn len(&self) -> usize;
    /// Appends the fragments of page `page`, in order. Appends no fragment if page `page` does not
    /// exist or has no bytes.
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>);
    /// Number of leading pages without bytes. A put cannot write such a page, and acknowledges it
    /// only if the store has it already.
    fn without_bytes(&self) -> usize {
        0
    }
    /// Whether zeroes follow the page in memory up to the next multiple of 4 KiB, as on disk, so
    /// that the kernel can write its last unit from this memory.
    fn padded(&self, _page: usize) -> bool {
        false
    }
    /// Whether the number of pages is zero.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The memory that receives the pages of a get.
///
/// # Safety
/// The fragments of a page are valid for reads and writes from any thread for as long as the value
/// lives; together they are as long as the page, and fragments of different pages do not overlap.
/// From the moment fragments are handed out until the call that received them returns, no other
/// code accesses their bytes. Exception: other threads may read sections that have arrived.
pub unsafe trait PageTarget: Send + Sync {
    /// Number of pages.
    fn len(&self) -> usize;
    /// Appends the fragments of page `page`, in order. Appends no fragment if page `page` does not
    /// exist. [`BorrowedPagesMut`] also appends none for a page that it has handed out before.
    fn fragments(&self, page: usize, out: &mut Vec<FragmentMut>);
    /// Whether the number of pages is zero.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

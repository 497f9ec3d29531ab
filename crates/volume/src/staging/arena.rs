//! The memory of [`super::Staging`]: one mapping, in huge pages where possible.

use ritornello_format::{Error, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::ptr::NonNull;

const HUGE: usize = 2 << 20;

/// The kind of memory of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Huge pages reserved by the administrator (`vm.nr_hugepages`).
    HugeTlb,
    /// Transparent huge pages.
    Transparent,
    /// Pages of 4 KiB, which halve the bandwidth of direct I/O.
    Small,
}

impl Backing {
    /// The kind as one lower-case word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::HugeTlb => "hugetlb",
            Self::Transparent => "transparent",
            Self::Small => "small",
        }
    }
    /// Whether pages are huge.
    #[must_use]
    pub const fn is_huge(self) -> bool {
        !matches!(self, Self::Small)
    }
}

/// One private anonymous mapping, 2 MiB-aligned, not inherited by forked children.
#[derive(Debug)]
pub(super) struct Arena {
    mapping: NonNull<c_void>,
    mapped: usize,
    base: NonNull<u8>,
    len: usize,
    backing: Backing,
    /// The process that made the mapping. A forked child does not inherit the mapping, and must not
    /// unmap it: the child may have another mapping at the same address.
    process: u32,
}

// SAFETY: an arena is plain memory; `Staging` hands out each part of it once.
unsafe impl Send for Arena {}
// SAFETY: as for `Send`.
unsafe impl Sync for Arena {}

impl Arena {
    pub(super) fn new(bytes: usize) -> Result<Self> {
        let len = bytes
            .max(1)
            .checked_next_multiple_of(HUGE)
            .filter(|len| *len <= isize::MAX as usize - HUGE)
            .ok_or_else(|| {
                Error::invalid("the staging size is too large: choose fewer bytes in flight")
                    .with("bytes", bytes)
            })?;
        let arena = match Self::reserved(len) {
            Some(arena) => arena,
            None => Self::transparent(len)?,
        };
        // SAFETY: the mapping was made above. A child must not inherit the mapping: with
        // copy-on-write the parent could get a new copy of a page while a read in flight fills the
        // old copy.
        let kept = unsafe { madvise(arena.mapping.as_ptr(), arena.mapped, Advice::LinuxDontFork) };
        kept.map_err(|error| Error::retry("the kernel refused MADV_DONTFORK").because(error))?;
        Ok(arena)
    }

    /// An arena in pages of the huge-page pool; `None` if the pool has too few free pages, or the
    /// pages cannot be touched without a risk of SIGBUS.
    fn reserved(len: usize) -> Option<Self> {
        let mapping = map(len, MapFlags::PRIVATE | MapFlags::HUGETLB).ok()?;
        let arena = Self {
            mapping,
            mapped: len,
            base: mapping.cast(),
            len,
            backing: Backing::HugeTlb,
            process: std::process::id(),
        };
        // If huge pages exceed the limit of a cgroup, the first access raises SIGBUS. Touch them by
        // a call that returns an error instead.
        // SAFETY: the mapping was made above.
        unsafe { madvise(mapping.as_ptr(), len, Advice::LinuxPopulateWrite) }.ok()?;
        Some(arena)
    }

    /// An arena in transparent huge pages, or in small pages where the kernel does not provide
    /// them.
    fn transparent(len: usize) -> Result<Self> {
        let mapped = len + HUGE;
        let mapping = map(mapped, MapFlags::PRIVATE | MapFlags::NORESERVE).map_err(|error| {
            Error::retry("no address space is left for staging: raise its limit (ulimit -v)")
                .because(error)
        })?;
        let skip = mapping.as_ptr().align_offset(HUGE).min(HUGE);
        // SAFETY: `skip + len <= mapped`.
        let base = unsafe { mapping.cast::<u8>().add(skip) };
        // SAFETY: the mapping was made above.
        let advised = unsafe { madvise(base.as_ptr().cast(), len, Advice::LinuxHugepage) };
        let allowed = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
            .is_ok_and(|modes| !modes.contains("[never]"));
        let huge = advised.is_ok() && allowed;
        let backing = if huge { Backing::Transparent } else { Backing::Small };
        let process = std::process::id();
        Ok(Self { mapping, mapped, base, len, backing, process })
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }
    pub(super) fn len(&self) -> usize {
        self.len
    }
    pub(super) fn backing(&self) -> Backing {
        self.backing
    }
}

fn map(len: usize, flags: MapFlags) -> rustix::io::Result<NonNull<c_void>> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new anonymous mapping overlaps no other.
    let at = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, flags) }?;
    NonNull::new(at).ok_or(rustix::io::Errno::NOMEM)
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        // SAFETY: mapped in `new`, and not in use: every buffer holds a reference to the `Staging`.
        let unmapped = unsafe { munmap(self.mapping.as_ptr(), self.mapped) };
        if let Err(error) = unmapped {
            tracing::warn!(%error, "staging memory could not be unmapped");
        }
    }
}

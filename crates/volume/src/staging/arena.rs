//! The memory under [`super::Staging`]: one mapping, in huge pages where possible.

use ritornello_format::{Error, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::ptr::NonNull;

const HUGE: usize = 2 << 20;

/// What kind of memory an arena is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Huge pages reserved by the administrator (`vm.nr_hugepages`).
    HugeTlb,
    /// Transparent huge pages.
    Transparent,
    /// Ordinary pages: half the bandwidth of direct I/O.
    Small,
}

impl Backing {
    /// In one word.
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
    /// A forked child does not have the mapping, and may have another in its place.
    process: u32,
}

// SAFETY: an arena is plain memory; who may touch which part of it is decided by `Staging`.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    pub(super) fn new(bytes: usize) -> Result<Self> {
        let len = bytes
            .max(1)
            .checked_next_multiple_of(HUGE)
            .filter(|len| *len <= isize::MAX as usize - HUGE)
            .ok_or_else(|| Error::invalid("staging cannot be that large").with("bytes", bytes))?;
        let arena = match Self::reserved(len) {
            Some(arena) => arena,
            None => Self::transparent(len)?,
        };
        // SAFETY: the mapping is ours. Without it a child's copy-on-write could redirect I/O.
        let kept = unsafe { madvise(arena.mapping.as_ptr(), arena.mapped, Advice::LinuxDontFork) };
        kept.map_err(|error| Error::retry("staging memory refused MADV_DONTFORK").because(error))?;
        Ok(arena)
    }

    /// In pages of the huge-page pool, if it has enough of them free right now.
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
        // A cgroup's limit on huge pages shows only when they are touched, as SIGBUS: touch them
        // through a call that returns an error instead.
        // SAFETY: the mapping is ours.
        unsafe { madvise(mapping.as_ptr(), len, Advice::LinuxPopulateWrite) }.ok()?;
        Some(arena)
    }

    fn transparent(len: usize) -> Result<Self> {
        let mapped = len + HUGE;
        let mapping = map(mapped, MapFlags::PRIVATE | MapFlags::NORESERVE)
            .map_err(|error| Error::retry("no address space for staging").because(error))?;
        let skip = mapping.as_ptr().align_offset(HUGE).min(HUGE);
        // SAFETY: `skip + len <= mapped`.
        let base = unsafe { mapping.cast::<u8>().add(skip) };
        // SAFETY: the mapping is ours.
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
    // SAFETY: a fresh anonymous mapping disturbs nothing.
    let at = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, flags) }?;
    NonNull::new(at).ok_or(rustix::io::Errno::NOMEM)
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        // SAFETY: mapped in `new`, and nothing refers to it: pieces hold the `Staging`.
        let unmapped = unsafe { munmap(self.mapping.as_ptr(), self.mapped) };
        if let Err(error) = unmapped {
            tracing::warn!(%error, "staging memory could not be unmapped");
        }
    }
}

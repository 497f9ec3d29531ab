//! Memory maps of segments in memory (tmpfs): a read or a write of such a segment is a memory copy.
//!
//! **Concurrent writers.** Every process that has the store open maps the same bytes and may write
//! to them during a copy. For example, a reader whose lease has expired may read space that now
//! belongs to a different run. The code therefore creates no Rust reference to mapped bytes: it
//! copies mapped bytes through raw pointers, and trusts a copy only after verifying its checksum.
//!
//! **No `SIGBUS`.** The kernel raises this signal for an access past the end of the file, and for a
//! missing page that cannot be allocated. All pages of a segment are therefore allocated when the
//! segment is created or, if its creation was interrupted, when the store is opened again; and a
//! segment is unlinked without being truncated ([`Segments::remove`](crate::Segments::remove)). The
//! length of the file is checked before every transfer, because another program may truncate the
//! file. Before an access, `madvise(2)` faults the pages in, and returns an error where the access
//! would raise the signal ([`Map::fault_in`]). Two cases remain: another program truncates the file
//! during a transfer, or the kernel is older than 5.14 and its `madvise` cannot fault pages in.
//!
//! **Huge pages.** A map in huge pages takes fewer faults and less time to translate addresses, and
//! the kernel allocates its memory faster. Few systems let tmpfs use huge pages by default, but
//! since Linux 6.1 a process may request them for a range (`MADV_COLLAPSE`), which requires no
//! privilege and no mount option: see [`Map::allocate_huge`].

use ritornello_medium::MediumFile;
use rustix::fd::BorrowedFd;
use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A huge page: the alignment of maps, and the bytes that are faulted in together.
pub(crate) const HUGE: usize = 2 << 20;
/// Bytes for which one call requests huge pages. The time is checked only between calls.
const COLLAPSE_BYTES: usize = 4 * HUGE;
/// Time after which no more huge pages are requested for a file. Requests take this long if memory
/// is fragmented, so that the kernel moves other pages to make room. Puts that need the segment
/// wait about this long.
const COLLAPSE_TIME: Duration = Duration::from_millis(500);
/// The file with the length in bytes of the kernel's huge pages. On kernels with pages of 16 or 64
/// KiB they are longer than [`HUGE`], and cannot be requested for a part of a segment.
const KERNEL_HUGE: &str = "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size";

/// A shared mapping of a whole segment file, not inherited by forked children.
pub(crate) struct Map {
    file: Arc<dyn MediumFile>,
    base: NonNull<c_void>,
    length: usize,
    /// For each 2 MiB of the file, whether this process has faulted its pages in.
    faulted: Box<[AtomicBool]>,
    /// The process that made the map. A forked child does not inherit the map, and must not unmap
    /// it: the child may have another mapping at the same address.
    process: u32,
}

// SAFETY: a mapping belongs to the process; its bytes are accessed through raw pointers only.
unsafe impl Send for Map {}
// SAFETY: as for `Send`.
unsafe impl Sync for Map {}

impl Map {
    /// Maps the first `length` bytes of `file`; `None` if the file has no descriptor.
    ///
    /// # Errors
    /// Any error of `mmap(2)` or `madvise(2)`.
    pub(crate) fn new(file: &Arc<dyn MediumFile>, length: u64) -> io::Result<Option<Self>> {
        let Some(descriptor) = file.descriptor() else { return Ok(None) };
        let length = usize::try_from(length).map_err(io::Error::other)?;
        let base = map_aligned(descriptor, length)?;
        let faulted = (0..length.div_ceil(HUGE)).map(|_| AtomicBool::new(false)).collect();
        let file = Arc::clone(file);
        let map = Self { file, base, length, faulted, process: std::process::id() };
        // SAFETY: the mapping was made above. A child must not keep memory that its parent unmaps.
        unsafe { madvise(base.as_ptr(), length, Advice::LinuxDontFork) }?;
        // Without huge pages the mapping works with small pages, so an error does not matter.
        // SAFETY: the mapping was made above.
        let _ = unsafe { madvise(base.as_ptr(), length, Advice::LinuxHugepage) };
        Ok(Some(map))
    }

    /// Current length of the file, at most the map's; zero if the file has been removed.
    ///
    /// # Errors
    /// Any error of `fstat(2)`.
    pub(crate) fn file_bytes(&self) -> io::Result<u64> {
        let Some(descriptor) = self.file.descriptor() else { return Ok(0) };
        let stat = fstat(descriptor)?;
        let bytes = u64::try_from(stat.st_size).unwrap_or(0).min(self.length as u64);
        Ok(if stat.st_nlink == 0 { 0 } else { bytes })
    }

    /// Faults `range` in, so that accesses to it raise no signal unless another program truncates
    /// the file. Does nothing on kernels before 5.14.
    ///
    /// # Errors
    /// `UnexpectedEof` if `range` exceeds the map; any error of `madvise(2)` if a missing page
    /// cannot be allocated.
    pub(crate) fn fault_in(&self, range: Range<u64>) -> io::Result<()> {
        let end = usize::try_from(range.end).map_err(io::Error::other)?;
        if end > self.length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        for piece in range.start as usize / HUGE..end.div_ceil(HUGE) {
            if self.faulted[piece].load(Ordering::Relaxed) {
                continue;
            }
            let at = piece * HUGE;
            let length = HUGE.min(self.length - at);
            // SAFETY: inside the mapping of `self`; the call changes no byte.
            let populated = unsafe {
                madvise(self.base.as_ptr().byte_add(at), length, Advice::LinuxPopulateRead)
            };
            match populated {
                // Kernels before 5.14 do not know the advice; on these kernels an access faults the
                // page in.
                Ok(()) | Err(Errno::INVAL) => self.faulted[piece].store(true, Ordering::Relaxed),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Allocates the memory of a new file in huge pages. The file must have the map's length.
    /// After an error, and behind the last whole huge page, some bytes have no memory yet:
    /// [`MediumFile::allocate`] must follow.
    ///
    /// # Errors
    /// Any error of `madvise(2)`: the kernel denies huge pages (`shmem_enabled`, `prctl(2)`), has
    /// none free, could not move a page, or is older than 6.1. On kernels from 5.14 to 6.0 the
    /// memory is in huge pages nevertheless if the mount allows them. `Unsupported` if the kernel's
    /// huge pages have another size. `TimedOut` if the kernel took long to make room. Any error of
    /// reading the length of the kernel's huge pages.
    pub(crate) fn allocate_huge(&self) -> io::Result<()> {
        let kernel = std::fs::read_to_string(KERNEL_HUGE)?;
        if kernel.trim().parse() != Ok(HUGE) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let begun = Instant::now();
        let whole = self.length / HUGE * HUGE;
        let at = |offset: usize| self.base.as_ptr().wrapping_byte_add(offset);
        // The kernel collapses a range into a huge page only if some page of it is allocated, and
        // allocates the huge page on the NUMA node of this page. So touch one page of each range.
        // If memory is interleaved, a page's number in the file determines its node, so touch a
        // page at a different offset in each range. If the mount allows huge pages, touching a page
        // allocates its huge page.
        let page = rustix::param::page_size();
        for offset in (0..whole).step_by(HUGE) {
            let touched = offset + offset / HUGE * page % HUGE;
            // SAFETY: inside the mapping of `self`; the call changes no byte.
            unsafe { madvise(at(touched), 1, Advice::LinuxPopulateWrite) }?;
        }
        for offset in (0..whole).step_by(COLLAPSE_BYTES) {
            let length = COLLAPSE_BYTES.min(whole - offset);
            // SAFETY: inside the mapping of `self`; the call changes no byte.
            let collapse =
                || match unsafe { libc::madvise(at(offset), length, libc::MADV_COLLAPSE) } {
                    0 => Ok(()),
                    _ => Err(io::Error::last_os_error()),
                };
            collapse().or_else(|error| match error.kind() {
                // A page of the range was in use for a moment: try again.
                io::ErrorKind::WouldBlock => collapse(),
                _ => Err(error),
            })?;
            if begun.elapsed() > COLLAPSE_TIME {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        Ok(())
    }

    /// The address of byte `at`.
    pub(crate) fn ptr_at(&self, at: u64) -> *mut u8 {
        debug_assert!(at < self.length as u64);
        self.base.as_ptr().cast::<u8>().wrapping_add(at as usize)
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        // SAFETY: mapped in `new`, and not in use: every copy holds a reference to `self`.
        let unmapped = unsafe { munmap(self.base.as_ptr(), self.length) };
        if let Err(error) = unmapped {
            tracing::warn!(%error, "a segment could not be unmapped");
        }
    }
}

/// Maps the first `length` bytes of a file at a multiple of [`HUGE`]: a map has huge pages only
/// where its address and the offset in the file agree modulo the size of a huge page.
fn map_aligned(file: BorrowedFd<'_>, length: usize) -> io::Result<NonNull<c_void>> {
    let kept = length.checked_next_multiple_of(rustix::param::page_size()).ok_or(Errno::NOMEM)?;
    let reserved = kept.checked_add(HUGE).ok_or(Errno::NOMEM)?;
    let (none, flags) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: a new mapping overlaps no other.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), reserved, none, flags) }?;
    let head = start.align_offset(HUGE).min(HUGE);
    let base = start.wrapping_byte_add(head);
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
    // SAFETY: replaces a part of the mapping made above, which is not in use.
    let mapped = unsafe { mmap(base, length, access, flags, file, 0) };
    // If `mmap` failed, the range between the unused parts may already belong to a mapping of
    // another thread, so it is not unmapped.
    for (unused, bytes) in [(start, head), (base.wrapping_byte_add(kept), HUGE - head)] {
        if bytes > 0 {
            // If `munmap` fails, this part of the address space stays reserved.
            // SAFETY: a part of the mapping made above, which is not in use.
            let _ = unsafe { munmap(unused, bytes) };
        }
    }
    Ok(NonNull::new(mapped?).ok_or(Errno::NOMEM)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_medium::{Access, Host, Medium};

    const BYTES: u64 = 5 << 20;

    fn file(dir: &std::path::Path) -> Arc<dyn MediumFile> {
        let access = Access { write: true, create: true, direct: false };
        let file = Host.open(&dir.join("seg-000000"), access).unwrap();
        file.allocate(BYTES).unwrap();
        file
    }

    #[test]
    fn two_maps_share_their_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let file = file(dir.path());
        let (one, two) =
            (Map::new(&file, BYTES).unwrap().unwrap(), Map::new(&file, BYTES).unwrap().unwrap());
        for at in [0, (2 << 20) - 1, BYTES - 1] {
            one.fault_in(at..at + 1).unwrap();
            two.fault_in(at..at + 1).unwrap();
            // SAFETY: inside the maps, and faulted in.
            unsafe { one.ptr_at(at).write(at as u8 | 1) };
            // SAFETY: inside the maps, and faulted in.
            assert_eq!(unsafe { two.ptr_at(at).read() }, at as u8 | 1);
        }
        assert!(one.fault_in(BYTES - 1..BYTES + 1).is_err());
    }

    /// Bytes of the mapping at `address` that are in huge pages.
    fn huge_bytes(address: usize) -> usize {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let found = smaps.lines().skip_while(|line| !line.starts_with(&format!("{address:x}-")));
        let kib = found.into_iter().find_map(|line| line.strip_prefix("ShmemPmdMapped:")).unwrap();
        kib.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    }

    /// A kernel may refuse huge pages; if it reports success, all maps must have them.
    #[test]
    fn memory_is_in_huge_pages_in_every_map() {
        let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return };
        let access = Access { write: true, create: true, direct: false };
        let file = Host.open(&dir.path().join("seg-000000"), access).unwrap();
        file.set_len(BYTES).unwrap();
        let map = Map::new(&file, BYTES).unwrap().unwrap();
        let outcome = map.allocate_huge();
        file.allocate(BYTES).unwrap();
        // More is allocated on a mount with `huge=always`: the last MiB gets a huge page too.
        assert!(file.allocated().unwrap() >= BYTES);
        let mut bytes = vec![1; BYTES as usize];
        assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
        assert!(bytes.iter().all(|byte| *byte == 0), "a new segment must hold zeroes");
        if outcome.is_ok() {
            let other = Map::new(&file, BYTES).unwrap().unwrap();
            other.fault_in(0..BYTES).unwrap();
            for map in [&map, &other] {
                assert_eq!(huge_bytes(map.ptr_at(0) as usize), 2 * HUGE);
            }
        }
    }

    #[test]
    fn allocation_behind_the_end_of_the_file_is_an_error() {
        let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return };
        let access = Access { write: true, create: true, direct: false };
        let file = Host.open(&dir.path().join("seg-000000"), access).unwrap();
        // The file is shorter than the map, so the kernel cannot provide its last pages.
        file.set_len(BYTES / 4).unwrap();
        let map = Map::new(&file, BYTES).unwrap().unwrap();
        assert!(map.allocate_huge().is_err(), "no error for memory behind the file");
    }

    #[test]
    fn truncation_and_removal_of_the_file_are_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let file = file(dir.path());
        let map = Map::new(&file, BYTES).unwrap().unwrap();
        assert_eq!(map.file_bytes().unwrap(), BYTES);
        file.set_len(4096).unwrap();
        assert_eq!(map.file_bytes().unwrap(), 4096);
        assert!(map.fault_in(2 << 20..3 << 20).is_err(), "no error for memory behind the file");
        Host.remove(&dir.path().join("seg-000000")).unwrap();
        assert_eq!(map.file_bytes().unwrap(), 0);
    }
}

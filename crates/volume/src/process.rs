//! Facts about this process: its id, cached so that every call can detect a fork without a system
//! call, and the bytes on its heap.

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// The cached process id, on a page that reads as zeroes in a forked child.
static CACHED_ID: OnceLock<Option<&'static AtomicU32>> = OnceLock::new();

/// The id of this process. In a forked child, returns the id of the child.
#[must_use]
pub fn process_id() -> u32 {
    let Some(cached) = CACHED_ID.get_or_init(wiped_on_fork) else { return std::process::id() };
    match cached.load(Ordering::Relaxed) {
        0 => {
            let id = std::process::id();
            cached.store(id, Ordering::Relaxed);
            id
        }
        id => id,
    }
}

/// Maps a page of memory that the kernel zeroes in a forked child, and returns the number at its
/// start; `None` if the kernel does not support this (before 4.14), or has no memory for the page.
fn wiped_on_fork() -> Option<&'static AtomicU32> {
    let (access, bytes) = (ProtFlags::READ | ProtFlags::WRITE, 4096);
    // SAFETY: a new anonymous mapping overlaps no other.
    let page = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::PRIVATE) };
    let page = page.ok()?;
    // SAFETY: the mapping was made above.
    unsafe { madvise(page, bytes, Advice::LinuxWipeOnFork) }.ok()?;
    // SAFETY: aligned, zeroed, never unmapped, and accessed through this reference only.
    Some(unsafe { AtomicU32::from_ptr(page.cast()) })
}

/// Bytes allocated on the heap as the allocator counts them, modulo 4 GiB; `None` if the allocator
/// does not count. Resident memory would be less accurate, because it includes the stacks of
/// threads that have ended.
#[must_use]
pub fn heap_bytes() -> Option<u32> {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: `mallinfo` takes the allocator's own locks and reads its counters.
        let counted = unsafe { libc::mallinfo() };
        Some(counted.uordblks.wrapping_add(counted.hblkhd).cast_unsigned())
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_id_is_the_process_id() {
        assert_eq!(process_id(), std::process::id());
        assert_eq!(process_id(), std::process::id());
    }

    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn heap_bytes_count_allocations() {
        let before = heap_bytes().unwrap();
        let cached = vec![1u8; 64 << 20];
        let after = heap_bytes().unwrap();
        assert!(after.wrapping_sub(before).cast_signed() > 32 << 20, "{before} {after}");
        drop(cached);
    }
}

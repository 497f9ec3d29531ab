//! This process: which one it is, without a system call, asked at every call to notice a fork; and
//! how much it has allocated.

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Where the process id is cached: on a page that the kernel hands to a forked child as zeroes.
static CACHED_ID: OnceLock<Option<&'static AtomicU32>> = OnceLock::new();

/// The id of this process; another one in a forked child.
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

/// A page of its own for one number, `None` if the kernel does not wipe pages (before 4.14).
fn wiped_on_fork() -> Option<&'static AtomicU32> {
    let (access, bytes) = (ProtFlags::READ | ProtFlags::WRITE, 4096);
    // SAFETY: a fresh anonymous mapping disturbs nothing.
    let page = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::PRIVATE) };
    let page = page.ok()?;
    // SAFETY: the mapping is ours.
    unsafe { madvise(page, bytes, Advice::LinuxWipeOnFork) }.ok()?;
    // SAFETY: aligned, zeroed, never unmapped, and reached through this reference only.
    Some(unsafe { AtomicU32::from_ptr(page.cast()) })
}

/// Bytes that are allocated on the heap, modulo 4 GiB, as the allocator counts them; `None` where it
/// does not. What is resident says less: threads that ended leave their stacks behind.
#[must_use]
pub fn heap_bytes() -> Option<u32> {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: it takes the allocator's own locks and reads its own counters.
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
    fn it_is_what_the_system_says() {
        assert_eq!(process_id(), std::process::id());
        assert_eq!(process_id(), std::process::id());
    }

    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn the_heap_is_counted() {
        let before = heap_bytes().unwrap();
        let cached = vec![1u8; 64 << 20];
        let after = heap_bytes().unwrap();
        assert!(after.wrapping_sub(before).cast_signed() > 32 << 20, "{before} {after}");
        drop(cached);
    }
}

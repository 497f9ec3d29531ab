//! This process: which one it is, without a system call, asked at every call to notice a fork; and
//! the memory that it does not use.

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Where the process id is kept: on a page that the kernel hands to a forked child as zeroes.
static KEPT: OnceLock<Option<&'static AtomicU32>> = OnceLock::new();

/// The id of this process; another one in a forked child.
#[must_use]
pub fn process_id() -> u32 {
    let Some(kept) = KEPT.get_or_init(wiped_on_fork) else { return std::process::id() };
    match kept.load(Ordering::Relaxed) {
        0 => {
            let id = std::process::id();
            kept.store(id, Ordering::Relaxed);
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

/// Gives memory that was freed back to the kernel, so that what is resident is what is in use. Does
/// nothing where the allocator has no such call.
pub fn release_free_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it takes the allocator's own locks and touches free memory only.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_what_the_system_says() {
        assert_eq!(process_id(), std::process::id());
        assert_eq!(process_id(), std::process::id());
    }
}

//! Whether a file system in memory provides huge pages, and what to do if it does not.

use crate::map::{HUGE, Map};
use ritornello_medium::{Access, Medium};
use std::path::Path;
use std::{fs, io};

/// The kernel setting that overrides mount options, with `deny` or `force`.
const KERNEL: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// Whether the memory of a new file gets huge pages ([`Map::allocate_huge`]). Changes the file at
/// `path`, which exists.
pub(super) fn are_available(medium: &dyn Medium, path: &Path) -> bool {
    let allocate = || -> io::Result<bool> {
        let file = medium.open(path, Access { write: true, create: false, direct: false })?;
        file.set_len(HUGE as u64)?;
        let Some(map) = Map::new(&file, HUGE as u64)? else { return Ok(false) };
        map.allocate_huge().map(|()| true)
    };
    allocate().unwrap_or(false)
}

/// Why files at `path` get no huge pages on a kernel that does not give them on request, and the
/// command that provides huge pages; `None` if the mount of `path` allows them, or is not found.
pub(super) fn why_unavailable(path: &Path) -> Option<String> {
    let kernel = fs::read_to_string(KERNEL).unwrap_or_default();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let path = fs::canonicalize(path.parent().filter(|_| !path.is_dir()).unwrap_or(path)).ok()?;
    diagnose(&kernel, &mounts, &path)
}

fn diagnose(kernel: &str, mounts: &str, path: &Path) -> Option<String> {
    if kernel.contains("[force]") {
        return None;
    }
    if kernel.contains("[deny]") {
        return Some(format!(
            "the kernel denies huge pages, so copies are a little slower: as root, \
             echo advise > {KERNEL}"
        ));
    }
    let (point, options) = mount_of(mounts, path)?;
    let huge = options.split(',').find_map(|option| option.strip_prefix("huge="));
    if huge.is_some_and(|huge| huge != "never") {
        return None;
    }
    Some(format!(
        "the mount has no huge pages, so copies are a little slower: as root, \
         mount -o remount,huge=advise {point}"
    ))
}

/// The mount point of `path` and the options of its file system. If a mount point has several
/// mounts, the last is in effect, because it hides the earlier mounts.
fn mount_of<'a>(mounts: &'a str, path: &Path) -> Option<(&'a str, &'a str)> {
    let mounts = mounts.lines().filter_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        Some((mount.split(' ').nth(4)?, file_system.split(' ').nth(2)?))
    });
    mounts.filter(|(point, _)| path.starts_with(point)).max_by_key(|(point, _)| point.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
25 22 0:23 / /dev/shm rw shared:4 - tmpfs tmpfs rw,size=24684092k
26 22 0:24 / /mnt/huge rw - tmpfs none rw,size=65536k,huge=advise
27 26 0:25 / /mnt/huge/not rw - tmpfs none rw,huge=never
";

    #[test]
    fn kernel_setting_overrides_mount_option() {
        let of = |kernel: &str, path: &str| diagnose(kernel, MOUNTS, Path::new(path));
        let never = "always within_size advise [never] deny force";
        let small = of(never, "/dev/shm/kv").unwrap();
        assert!(small.ends_with("mount -o remount,huge=advise /dev/shm"), "{small}");
        assert_eq!(of(never, "/mnt/huge/kv"), None);
        assert!(of(never, "/mnt/huge/not/kv").is_some());
        let denied = "always within_size advise never [deny] force";
        assert!(of(denied, "/mnt/huge/kv").unwrap().contains("shmem_enabled"));
        assert_eq!(of("always never deny [force]", "/dev/shm/kv"), None);
    }
}

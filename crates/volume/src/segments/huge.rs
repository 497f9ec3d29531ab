//! Whether a file system in memory provides huge pages, and what to do if it does not.

use super::selftest::test_file;
use crate::map::{HUGE, Map};
use ritornello_medium::{Access, Medium};
use std::path::Path;
use std::{fs, io};

/// The kernel setting that overrides mount options, with `deny` or `force`.
const KERNEL: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// Why files in `dir` get no huge pages, and what to do. `None` if the kernel gives a test file a
/// huge page on request ([`Map::allocate_huge`]), if `dir` cannot be resolved, or if the kernel
/// setting is `force`. `None` too if the setting is not `deny`, and the mount allows huge pages or
/// is not found.
pub(super) fn why_unavailable(medium: &dyn Medium, dir: &Path) -> Option<String> {
    let path = test_file(dir);
    let requested = request(medium, &path);
    // The file may not exist: ignore the error.
    let _ = medium.remove(&path);
    let error = requested.err()?;
    let kernel = fs::read_to_string(KERNEL).unwrap_or_default();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    diagnose(&error, &kernel, &mounts, &fs::canonicalize(dir).ok()?)
}

/// Requests one huge page for a new file at `path`.
fn request(medium: &dyn Medium, path: &Path) -> io::Result<()> {
    let file = medium.open(path, Access { write: true, create: true, direct: false })?;
    file.set_len(HUGE as u64)?;
    let map = Map::new(&file, HUGE as u64)?.ok_or(io::ErrorKind::Unsupported)?;
    map.allocate_huge()
}

fn diagnose(error: &io::Error, kernel: &str, mounts: &str, path: &Path) -> Option<String> {
    if kernel.contains("[force]") {
        return None;
    }
    if kernel.contains("[deny]") {
        return Some(format!(
            "the kernel denies huge pages, so copies are slower: as root, \
             echo advise > {KERNEL}"
        ));
    }
    let (point, options) = mount_of(mounts, path)?;
    let huge = options.split(',').find_map(|option| option.strip_prefix("huge="));
    if huge.is_some_and(|huge| huge != "never") {
        return None;
    }
    Some(format!(
        "the kernel gave no huge page on request ({error}), so copies are slower: as root, \
         mount -o remount,huge=within_size {point}"
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
    fn kernel_settings_deny_and_force_override_mount_options() {
        let error = io::Error::from(io::ErrorKind::InvalidInput);
        let of = |kernel: &str, path: &str| diagnose(&error, kernel, MOUNTS, Path::new(path));
        let never = "always within_size advise [never] deny force";
        let small = of(never, "/dev/shm/kv").unwrap();
        assert!(small.ends_with("mount -o remount,huge=within_size /dev/shm"), "{small}");
        assert_eq!(of(never, "/mnt/huge/kv"), None);
        assert!(of(never, "/mnt/huge/not/kv").is_some());
        let denied = "always within_size advise never [deny] force";
        assert!(of(denied, "/mnt/huge/kv").unwrap().contains("shmem_enabled"));
        assert_eq!(of("always never deny [force]", "/dev/shm/kv"), None);
    }
}

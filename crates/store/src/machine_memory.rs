//! The memory available to this process, and whether a store in memory fits into it.

use crate::budget::Budget;
use ritornello_format::{Error, Result};
use ritornello_medium::{Room, TMPFS};
use std::fs;
use std::path::Path;

/// A limit of at least this number of bytes counts as none: control groups of version 1 express "no
/// limit" as a number near 2^63.
const NO_LIMIT: u64 = 1 << 60;

/// Returns the bytes of memory that this process may use: the machine's memory, or the limit of
/// [`control_group`], if the limit is less.
pub(crate) fn available() -> u64 {
    let info = rustix::system::sysinfo();
    let machine = (info.totalram as u64).saturating_mul(u64::from(info.mem_unit));
    control_group().map_or(machine, |group| group.limit.min(machine))
}

/// The memory of a control group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlGroup {
    /// Limit in bytes.
    pub limit: u64,
    /// Used bytes.
    pub used: u64,
    /// Used bytes that are cached files, which the kernel reclaims on demand.
    pub cached: u64,
}

/// Returns the control group with the tightest limit among the groups of version 2 that hold this
/// process; if none of them has a limit, the group at the root of the mount of version 1. `None` if
/// this group has no limit, too.
#[must_use]
pub fn control_group() -> Option<ControlGroup> {
    tightest(Path::new("/sys/fs/cgroup"))
}

fn tightest(root: &Path) -> Option<ControlGroup> {
    let number =
        |path: &Path| -> Option<u64> { fs::read_to_string(path).ok()?.trim().parse().ok() };
    let cached = |dir: &Path| -> u64 {
        let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
        let of = |line: &str| {
            let (name, bytes) = line.split_once(' ')?;
            // These two counters exclude files on tmpfs, because the kernel counts their pages as
            // anonymous memory.
            let is_file = ["active_file", "inactive_file"].contains(&name);
            is_file.then(|| bytes.trim().parse::<u64>().ok())?
        };
        stat.lines().filter_map(of).sum()
    };
    let group = |dir: &Path, limit: &str, used: &str| {
        let limit = number(&dir.join(limit)).filter(|limit| *limit < NO_LIMIT)?;
        Some(ControlGroup { limit, used: number(&dir.join(used))?, cached: cached(dir) })
    };
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = groups.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default();
    let own = root.join(own.trim_start_matches('/'));
    let above = own.ancestors().take_while(|dir| dir.starts_with(root));
    above
        .filter_map(|dir| group(dir, "memory.max", "memory.current"))
        .min_by_key(|group| group.limit)
        .or_else(|| group(&root.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"))
}

/// Returns the bytes that the machine can still allocate (`MemAvailable`), without regard to
/// control groups; `u64::MAX` if the kernel does not report them.
#[must_use]
pub fn memory_left() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map_or(u64::MAX, |kib| kib.saturating_mul(1024))
}

/// A limit on the space of a store on a file system in memory.
struct Source {
    /// Bytes that the limit leaves for the store.
    left: u64,
    /// The limit's name in errors.
    what: &'static str,
    /// How the user can get more memory.
    advice: &'static str,
}

/// Returns the limits of a store on a file system in memory, whose space is `room`: the memory left
/// in the control group, if the group has a limit, and on the machine, and the space left in the
/// file system.
fn sources(room: &Room) -> Vec<Source> {
    let group = control_group().map(|group| Source {
        left: group.limit.saturating_sub(group.used.saturating_sub(group.cached)),
        what: "the memory limit of this control group",
        advice: "raise this limit (docker run --memory, resources.limits.memory)",
    });
    let machine = Source {
        left: memory_left(),
        what: "the memory that is available on this machine (MemAvailable)",
        advice: "end processes that use memory",
    };
    let file_system = Source {
        left: room.available.saturating_sub(Budget::floor(room.total)),
        what: "the file system in memory",
        advice: "make the file system larger (as root: mount -o remount,size=64G on its mount \
                 point; docker run --shm-size)",
    };
    group.into_iter().chain([machine, file_system]).collect()
}

/// Checks that a file system in memory, whose space is `room`, can take `bytes` more. Other file
/// systems pass.
///
/// # Errors
/// `Invalid` if `bytes` do not fit; the error names the limit, a capacity that would fit, and
/// advice.
pub fn check_memory(room: &Room, bytes: u64) -> Result<()> {
    if room.kind != TMPFS {
        return Ok(());
    }
    check_sources(&sources(room), bytes)
}

fn check_sources(sources: &[Source], bytes: u64) -> Result<()> {
    let Some(least) = sources.iter().min_by_key(|source| source.left) else { return Ok(()) };
    if bytes <= least.left {
        return Ok(());
    }
    let Source { left, what, advice } = least;
    Err(Error::invalid(format!(
        "{what} leaves {} MiB for a store in memory: give a capacity of {}MiB or less, or {advice}",
        left >> 20,
        (left >> 20) / 10 * 9,
    ))
    .with("bytes", bytes)
    .with("left", left))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_check_names_the_scarcest_source() {
        let of = |left, what| Source { left, what, advice: "find more" };
        let sources = [of(100 << 20, "the machine"), of(50 << 20, "the group")];
        assert!(check_sources(&sources, 50 << 20).is_ok());
        let error = check_sources(&sources, 51 << 20).unwrap_err().to_string();
        assert!(error.contains("the group leaves 50 MiB"), "{error}");
        assert!(error.contains("45MiB or less, or find more"), "{error}");
        assert!(check_sources(&[], u64::MAX).is_ok());
    }

    #[test]
    fn only_file_systems_in_memory_are_checked() {
        let disk = Room { kind: 0xef53, ..Room::default() };
        assert!(check_memory(&disk, u64::MAX).is_ok());
        let small = Room { kind: TMPFS, available: 64 << 20, total: 64 << 20 };
        assert!(check_memory(&small, 1 << 20).is_ok());
        assert!(check_memory(&small, 64 << 20).is_err(), "a part of the file system is kept free");
    }

    #[test]
    fn control_group_reports_used_and_cached() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("memory");
        fs::create_dir(&group).unwrap();
        let write = |name: &str, text: &str| fs::write(group.join(name), text).unwrap();
        write("memory.limit_in_bytes", "1000000");
        write("memory.usage_in_bytes", "900000");
        write("memory.stat", "cache 5\ninactive_file 300000\nactive_file 100000\n");
        let found = tightest(root.path()).unwrap();
        assert_eq!(found, ControlGroup { limit: 1_000_000, used: 900_000, cached: 400_000 });
    }

    #[test]
    fn missing_control_group_has_no_limit() {
        assert!(available() > 16 << 20);
        assert_eq!(tightest(Path::new("/nowhere/at/all")), None);
    }
}

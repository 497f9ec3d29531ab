//! How much memory this process may have.

use std::fs;
use std::path::Path;

/// Bytes: the machine's, or the limit of the tightest control group above this process (version 2,
/// then 1) where that is less.
pub(crate) fn available() -> u64 {
    let info = rustix::system::sysinfo();
    let machine = (info.totalram as u64).saturating_mul(u64::from(info.mem_unit));
    control_groups(Path::new("/sys/fs/cgroup")).map_or(machine, |limit| limit.min(machine))
}

fn control_groups(root: &Path) -> Option<u64> {
    let number =
        |path: &Path| -> Option<u64> { fs::read_to_string(path).ok()?.trim().parse().ok() };
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = groups.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default();
    let group = root.join(own.trim_start_matches('/'));
    let above = group.ancestors().take_while(|dir| dir.starts_with(root));
    let tightest = above.filter_map(|dir| number(&dir.join("memory.max"))).min();
    tightest.or_else(|| number(&root.join("memory/memory.limit_in_bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_some_and_no_group_is_no_limit() {
        assert!(available() > 16 << 20);
        assert_eq!(control_groups(Path::new("/nowhere/at/all")), None);
    }
}

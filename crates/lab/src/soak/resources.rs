//! Open files, threads and memory of this process, whose growth `soak` reports.

use std::fs;

/// Numbers of open files and threads of a process, and bytes of its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Number of open file descriptors.
    pub fds: i64,
    /// Number of threads.
    pub threads: i64,
    /// Bytes allocated on the heap, modulo 4 GiB; if the allocator does not count them, resident
    /// anonymous bytes.
    pub memory: i64,
}

impl Resources {
    /// Returns the current values; an unreadable value is zero.
    #[must_use]
    pub fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<i64>().ok()
        };
        Self {
            fds: fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count() as i64),
            threads: field("Threads:").unwrap_or(0),
            memory: ritornello_volume::heap_bytes()
                .map_or_else(|| field("RssAnon:").unwrap_or(0) << 10, i64::from),
        }
    }

    /// Returns the median of the last third less the median of the second third, or zero if the
    /// difference is negative. The first third does not count, because caches and the allocator's
    /// arenas warm up.
    #[must_use]
    pub fn growth(history: &[Self]) -> Self {
        let third = history.len() / 3;
        let median = |part: &[Self], of: fn(&Self) -> i64| {
            let mut values: Vec<i64> = part.iter().map(of).collect();
            values.sort_unstable();
            values.get(values.len() / 2).copied().unwrap_or(0)
        };
        let grown = |of: fn(&Self) -> i64| {
            let (first, last) = history[third..].split_at((history.len() - third) / 2);
            (median(last, of) - median(first, of)).max(0)
        };
        Self { fds: grown(|h| h.fds), threads: grown(|h| h.threads), memory: grown(|h| h.memory) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_compares_medians_of_the_last_two_thirds() {
        let at = |fds| Resources { fds, ..Resources::default() };
        assert_eq!(Resources::growth(&[at(90), at(2), at(5), at(6), at(7), at(8)]).fds, 2);
        assert_eq!(Resources::growth(&[at(9), at(8), at(7)]).fds, 0);
        assert_eq!(Resources::growth(&[]), Resources::default());
        let now = Resources::now();
        assert!(now.fds > 0 && now.threads > 0 && now.memory > 0, "{now:?}");
    }
}

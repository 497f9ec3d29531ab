//! What this process holds.

use std::fs;

/// Open files, threads and memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Descriptors.
    pub fds: i64,
    /// Threads.
    pub threads: i64,
    /// Bytes allocated on the heap; where the allocator does not count them, resident bytes that
    /// belong to no file.
    pub memory: i64,
}

impl Health {
    /// That of now; what cannot be read is zero.
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

    /// How much more the last third has than the second one, in the median: in the first, caches
    /// and the allocator's arenas come to their size.
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
    fn growth_is_between_the_thirds() {
        let at = |fds| Health { fds, ..Health::default() };
        assert_eq!(Health::growth(&[at(90), at(2), at(5), at(6), at(7), at(8)]).fds, 2);
        assert_eq!(Health::growth(&[at(9), at(8), at(7)]).fds, 0);
        assert_eq!(Health::growth(&[]), Health::default());
        let now = Health::now();
        assert!(now.fds > 0 && now.threads > 0 && now.memory > 0, "{now:?}");
    }
}

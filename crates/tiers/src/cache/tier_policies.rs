//! Write policies of tiers, and the prefetch policy: the maximum time that a lookup stays pending.

use ritornello_format::{Error, Result};
use std::time::Duration;

/// When pages of the tiers above are written to this tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WritePolicy {
    /// As soon as the first tier has them, in the background.
    #[default]
    WriteThrough,
    /// After this number of lookups by this process have found the page.
    Selective(u32),
    /// When the tier above is three quarters full and the dirty pages of this process use more than
    /// a quarter of it, and at a flush. Pages for which the tier above has no room are written
    /// immediately.
    WriteBack,
    /// Never; this process still reads pages that other processes wrote.
    Never,
}

impl WritePolicy {
    /// Parses a policy's name as users type it.
    ///
    /// # Errors
    /// `Invalid`, listing the names.
    pub fn parse(word: &str) -> Result<Self> {
        let times = word.strip_prefix("selective(").and_then(|rest| rest.strip_suffix(')'));
        match (word, times.and_then(|times| times.trim().parse().ok())) {
            ("write_through", _) => Ok(Self::WriteThrough),
            ("write_back", _) => Ok(Self::WriteBack),
            ("none", _) => Ok(Self::Never),
            (_, Some(times @ 1..)) => Ok(Self::Selective(times)),
            _ => Err(Error::invalid(
                "write is write_through, write_back, none, or selective(N): after N hits, with N at least 1",
            )
            .with("given", word)),
        }
    }
}

/// Maximum time that a [`lookup`](super::Cache::lookup) stays pending while a remote is queried or
/// pages are fetched from it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PrefetchPolicy {
    /// No time: the lookup returns the local pages, and fetched pages serve later lookups.
    BestEffort,
    /// Until the prefetch has ended, with or without all pages worth fetching, or
    /// [`MAX_LOOKUP_WAIT`] has passed.
    WaitComplete,
    /// For `base`. Once the remote has answered, also for `per_ki_token` per 1,024 tokens of the
    /// prompt whose pages are on no local tier. In all at least for one and a half times the gate's
    /// estimate of the load, and at most for [`MAX_LOOKUP_WAIT`].
    Timeout {
        /// Time that does not depend on the number of tokens.
        base: Duration,
        /// Additional time per 1,024 tokens.
        per_ki_token: Duration,
    },
}

/// Maximum time a lookup stays pending under any policy.
pub const MAX_LOOKUP_WAIT: Duration = Duration::from_secs(30);

impl Default for PrefetchPolicy {
    fn default() -> Self {
        Self::Timeout { base: Duration::from_secs(1), per_ki_token: Duration::from_millis(250) }
    }
}

impl PrefetchPolicy {
    /// Parses what users type: `best_effort`, `wait_complete`, `timeout`, or `timeout(1, 0.25)`
    /// with both numbers in seconds.
    ///
    /// # Errors
    /// `Invalid`, listing the names.
    pub fn parse(word: &str) -> Result<Self> {
        match word {
            "best_effort" => return Ok(Self::BestEffort),
            "wait_complete" => return Ok(Self::WaitComplete),
            "timeout" => return Ok(Self::default()),
            _ => {}
        }
        let seconds = |text: &str| {
            let seconds: f64 = text.trim().parse().ok()?;
            Duration::try_from_secs_f64(seconds).ok()
        };
        word.strip_prefix("timeout(")
            .and_then(|rest| rest.strip_suffix(')')?.split_once(','))
            .and_then(|(base, more)| {
                Some(Self::Timeout { base: seconds(base)?, per_ki_token: seconds(more)? })
            })
            .ok_or_else(|| {
                Error::invalid(
                    "prefetch is best_effort, wait_complete, timeout, or timeout(SECONDS, MORE), as in \
                    timeout(1, 0.25): 1 second, and 0.25 seconds more for every 1,024 tokens",
                )
                .with("given", word)
            })
    }

    /// Maximum time a lookup stays pending while pages are fetched, if pages of `tokens` tokens are
    /// on no local tier. `expected` is the gate's estimate of the time to load; zero if the gate
    /// has none.
    #[must_use]
    pub fn max_wait(&self, tokens: u64, expected: Duration) -> Duration {
        match *self {
            Self::BestEffort => Duration::ZERO,
            Self::WaitComplete => MAX_LOOKUP_WAIT,
            Self::Timeout { base, per_ki_token } => {
                let more = per_ki_token.as_secs_f64() * tokens as f64 / 1024.0;
                let more = Duration::try_from_secs_f64(more).unwrap_or(MAX_LOOKUP_WAIT);
                // If a fetch is worth its time, the lookup must not stop waiting just before the
                // fetch ends.
                let expected = expected.saturating_mul(3) / 2;
                base.saturating_add(more).max(expected).min(MAX_LOOKUP_WAIT)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_parse_and_errors_list_names() {
        for (word, policy) in [
            ("write_through", WritePolicy::WriteThrough),
            ("selective(3)", WritePolicy::Selective(3)),
            ("write_back", WritePolicy::WriteBack),
            ("none", WritePolicy::Never),
        ] {
            assert_eq!(WritePolicy::parse(word).unwrap(), policy);
        }
        for word in ["", "selective", "selective(0)", "selective(x)", "through"] {
            let error = WritePolicy::parse(word).unwrap_err().to_string();
            assert!(error.contains("write_back"), "{error}");
        }
        for word in ["", "timeout(1)", "timeout(-1, 0)", "never"] {
            assert!(PrefetchPolicy::parse(word).unwrap_err().to_string().contains("best_effort"));
        }
    }

    #[test]
    fn max_wait_grows_with_tokens_up_to_limit() {
        let policy = PrefetchPolicy::parse("timeout(0.5, 0.25)").unwrap();
        let unknown = Duration::ZERO;
        assert_eq!(policy.max_wait(0, unknown), Duration::from_millis(500));
        assert_eq!(policy.max_wait(4096, Duration::from_secs(1)), Duration::from_millis(1500));
        assert_eq!(policy.max_wait(u64::MAX, unknown), MAX_LOOKUP_WAIT);
        assert_eq!(policy.max_wait(4096, Duration::from_secs(4)), Duration::from_secs(6));
        assert_eq!(policy.max_wait(0, MAX_LOOKUP_WAIT), MAX_LOOKUP_WAIT);
        assert_eq!(PrefetchPolicy::BestEffort.max_wait(9_999, MAX_LOOKUP_WAIT), Duration::ZERO);
    }
}

//! Whether a remote is worth asking: after several failures in a row it is left alone for a while.

use std::time::{Duration, Instant};

/// Failures in a row that it takes.
const FAILURES: u32 = 5;
/// How long it is left alone, at first and at most; doubled each time that it fails again.
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);

/// What the last call came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It answered.
    Answered,
    /// It did not, or not in time.
    Failed,
    /// It refuses, and will go on refusing.
    Refused,
}

#[derive(Debug, Default)]
pub(super) struct Breaker {
    failures: u32,
    /// Since when it is open, and for how long.
    open: Option<(Instant, Duration)>,
    /// Since when one call is on its way to find out.
    trying: Option<Instant>,
}

impl Breaker {
    /// Whether a call may be made. Whoever may says what came of it; who was to find out and does not say
    /// so (nobody waited for the answer) is not waited for longer than anybody is.
    pub(super) fn admits(&mut self, now: Instant) -> bool {
        match self.open {
            None => true,
            Some((since, wait)) => {
                let silent = self.trying.is_none_or(|begun| now >= begun + LONGEST);
                let may = silent && now >= since + wait;
                if may {
                    self.trying = Some(now);
                }
                may
            }
        }
    }

    /// Whether it just opened, or just closed.
    pub(super) fn hear(&mut self, verdict: Verdict, now: Instant) -> Option<bool> {
        self.trying = None;
        if verdict == Verdict::Answered {
            self.failures = 0;
            return self.open.take().map(|_| false);
        }
        self.failures = self.failures.saturating_add(1);
        let enough = verdict == Verdict::Refused || self.failures >= FAILURES;
        let wait = match self.open {
            Some((_, wait)) => (wait * 2).min(LONGEST),
            None if verdict == Verdict::Refused => LONGEST,
            None if enough => FIRST,
            None => return None,
        };
        let was_open = self.open.replace((now, wait)).is_some();
        (!was_open).then_some(true)
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_after_some_failures_tries_once_and_closes_with_an_answer() {
        let (mut breaker, start) = (Breaker::default(), Instant::now());
        for failure in 1..=FAILURES {
            assert!(breaker.admits(start));
            let changed = breaker.hear(Verdict::Failed, start);
            assert_eq!(changed, (failure == FAILURES).then_some(true));
        }
        assert!(!breaker.admits(start));
        let later = start + FIRST;
        assert!(breaker.admits(later));
        assert!(!breaker.admits(later), "one call at a time finds out");
        assert_eq!(breaker.hear(Verdict::Failed, later), None);
        assert!(!breaker.admits(later + FIRST), "it waits longer now");
        assert!(breaker.admits(later + 2 * FIRST));
        assert_eq!(breaker.hear(Verdict::Answered, later), Some(false));
        assert!(breaker.admits(later) && breaker.admits(later));
    }

    #[test]
    fn a_trial_that_nobody_hears_of_does_not_close_the_remote_for_good() {
        let (mut breaker, start) = (Breaker::default(), Instant::now());
        breaker.hear(Verdict::Refused, start);
        let later = start + LONGEST;
        assert!(breaker.admits(later));
        assert!(!breaker.admits(later + LONGEST / 2));
        assert!(breaker.admits(later + LONGEST));
    }

    #[test]
    fn a_refusal_opens_it_at_once_and_for_long() {
        let (mut breaker, start) = (Breaker::default(), Instant::now());
        assert_eq!(breaker.hear(Verdict::Refused, start), Some(true));
        assert!(!breaker.admits(start + LONGEST / 2));
        assert!(breaker.admits(start + LONGEST));
    }
}

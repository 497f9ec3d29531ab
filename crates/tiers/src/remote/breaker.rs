//! Whether a remote is worth asking: after several failures in a row it is left alone for a while.

use std::time::{Duration, Instant};

/// Failures in a row that it takes.
const FAILURES: u32 = 5;
/// How long it is left alone, at first and at most; doubled each time that it fails again.
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);

/// What the last call came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallOutcome {
    /// It answered.
    Answered,
    /// It did not, or not in time.
    Failed,
    /// It refuses, and will go on refusing.
    Refused,
}

/// Which call it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallKind {
    /// One as any, of a remote that was thought to answer.
    Regular,
    /// The one that is to find out whether it answers again.
    Probe,
}

#[derive(Debug, Default)]
pub(super) struct Breaker {
    failures: u32,
    /// Since when it is open, and for how long.
    open: Option<(Instant, Duration)>,
    /// Since when one call is on its way to find out.
    probing_since: Option<Instant>,
}

impl Breaker {
    /// Whether a call may be made, and if so which it is. Whoever may says what came of it; who was to find
    /// out and does not say so (nobody waited for the answer) is not waited for longer than anybody is.
    pub(super) fn admit(&mut self, now: Instant) -> Option<CallKind> {
        let Some((since, wait)) = self.open else { return Some(CallKind::Regular) };
        let silent = self.probing_since.is_none_or(|begun| now >= begun + LONGEST);
        (silent && now >= since + wait).then(|| {
            self.probing_since = Some(now);
            CallKind::Probe
        })
    }

    /// Whether it just opened, or just closed.
    pub(super) fn record(
        &mut self,
        call: CallKind,
        outcome: CallOutcome,
        now: Instant,
    ) -> Option<bool> {
        if outcome == CallOutcome::Answered {
            (self.probing_since, self.failures) = (None, 0);
            return self.open.take().map(|_| false);
        }
        self.failures = self.failures.saturating_add(1);
        let enough = outcome == CallOutcome::Refused || self.failures >= FAILURES;
        let wait = match self.open {
            // Calls that were on their way when it opened say nothing new.
            Some(_) if call == CallKind::Regular => return None,
            Some((_, wait)) => (wait * 2).min(LONGEST),
            None if outcome == CallOutcome::Refused => LONGEST,
            None if enough => FIRST,
            None => return None,
        };
        self.probing_since = None;
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

    use CallKind::{Probe, Regular};

    #[test]
    fn it_opens_after_some_failures_tries_once_and_closes_with_an_answer() {
        let (mut breaker, start) = (Breaker::default(), Instant::now());
        for failure in 1..=FAILURES {
            assert_eq!(breaker.admit(start), Some(Regular));
            let changed = breaker.record(Regular, CallOutcome::Failed, start);
            assert_eq!(changed, (failure == FAILURES).then_some(true));
        }
        assert_eq!(breaker.admit(start), None);
        let later = start + FIRST;
        assert_eq!(breaker.admit(later), Some(Probe));
        assert_eq!(breaker.admit(later), None, "one call at a time finds out");
        assert_eq!(breaker.record(Probe, CallOutcome::Failed, later), None);
        assert_eq!(breaker.admit(later + FIRST), None, "it waits longer now");
        assert_eq!(breaker.admit(later + 2 * FIRST), Some(Probe));
        assert_eq!(breaker.record(Probe, CallOutcome::Answered, later), Some(false));
        assert_eq!(breaker.admit(later), breaker.admit(later));
    }

    #[test]
    fn calls_that_were_on_their_way_when_it_opened_make_nobody_wait_longer() {
        let (mut breaker, start) = (Breaker::default(), Instant::now());
        for _ in 0..20 + FAILURES {
            breaker.record(Regular, CallOutcome::Failed, start);
        }
        let later = start + FIRST;
        assert_eq!(breaker.admit(later), Some(Probe));
        breaker.record(Regular, CallOutcome::Failed, later);
        assert_eq!(breaker.admit(later + FIRST), None, "the trial is still on its way");
        assert_eq!(breaker.record(Regular, CallOutcome::Answered, later), Some(false));
    }

    #[test]
    fn a_trial_that_nobody_hears_of_does_not_close_the_remote_for_good() {
        let (mut breaker, start) = (Breaker::default(), Instant::now());
        breaker.record(Regular, CallOutcome::Refused, start);
        let later = start + LONGEST;
        assert_eq!(breaker.admit(later), Some(Probe));
        assert_eq!(breaker.admit(later + LONGEST / 2), None);
        assert_eq!(breaker.admit(later + LONGEST), Some(Probe));
    }

    #[test]
    fn a_refusal_opens_it_at_once_and_for_long() {
        let (mut breaker, start) = (Breaker::default(), Instant::now());
        assert_eq!(breaker.record(Regular, CallOutcome::Refused, start), Some(true));
        assert_eq!(breaker.admit(start + LONGEST / 2), None);
        assert_eq!(breaker.admit(start + LONGEST), Some(Probe));
    }
}

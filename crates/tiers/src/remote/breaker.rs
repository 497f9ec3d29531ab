//! Circuit breaker: after several consecutive failures, or one refusal, no calls are made to a
//! remote until a wait has passed.

use std::time::{Duration, Instant};

/// Consecutive failures that open the breaker.
const FAILURES: u32 = 5;
/// Minimum time from the opening of the breaker by failures to the first trial call. The time
/// doubles when a trial call fails or is refused, up to [`LONGEST`]. If a refusal opens the
/// breaker, this time is [`LONGEST`].
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallOutcome {
    /// The remote answered.
    Answered,
    /// The remote failed or did not answer in time.
    Failed,
    /// The remote refuses and will keep refusing.
    Refused,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallKind {
    /// A call while the breaker is closed.
    Regular,
    /// The single trial call while the breaker is half open.
    HalfOpenTrial,
}

#[derive(Debug, Default)]
pub(super) struct Breaker {
    failures: u32,
    /// When the breaker opened or its last trial call failed, and the time after this moment during
    /// which no call is made.
    open: Option<(Instant, Duration)>,
    /// When the current trial call began.
    trial_since: Option<Instant>,
    /// Number of times that the breaker opened.
    pub(super) openings: u64,
    /// When the breaker opened, while it is open.
    opened: Option<Instant>,
    /// Total time that the breaker was open, up to the last time that it closed.
    open_before: Duration,
}

impl Breaker {
    /// Returns the kind of call that may be made now; `None` if no call may be made. The caller
    /// must record the outcome. If the outcome of a trial call is never recorded, the next trial
    /// may begin [`LONGEST`] after that call began.
    pub(super) fn admit(&mut self, now: Instant) -> Option<CallKind> {
        let Some((since, wait)) = self.open else { return Some(CallKind::Regular) };
        let no_trial = self.trial_since.is_none_or(|begun| now >= begun + LONGEST);
        (no_trial && now >= since + wait).then(|| {
            self.trial_since = Some(now);
            CallKind::HalfOpenTrial
        })
    }

    /// Records the outcome of a call. Returns true if the breaker opened, false if it closed, and
    /// `None` if neither.
    pub(super) fn record(
        &mut self,
        call: CallKind,
        outcome: CallOutcome,
        now: Instant,
    ) -> Option<bool> {
        if outcome == CallOutcome::Answered {
            (self.trial_since, self.failures) = (None, 0);
            self.open_before = self.open_time(now);
            self.opened = None;
            return self.open.take().map(|_| false);
        }
        self.failures = self.failures.saturating_add(1);
        let enough = outcome == CallOutcome::Refused || self.failures >= FAILURES;
        let wait = match self.open {
            // A call that began before the breaker opened does not extend the wait.
            Some(_) if call == CallKind::Regular => return None,
            Some((_, wait)) => (wait * 2).min(LONGEST),
            None if outcome == CallOutcome::Refused => LONGEST,
            None if enough => FIRST,
            None => return None,
        };
        self.trial_since = None;
        let was_open = self.open.replace((now, wait)).is_some();
        if !was_open {
            self.openings += 1;
            self.opened = Some(now);
        }
        (!was_open).then_some(true)
    }

    /// Total time until `now` that the breaker was open.
    pub(super) fn open_time(&self, now: Instant) -> Duration {
        let open = self.opened.map(|opened| now.saturating_duration_since(opened));
        self.open_before + open.unwrap_or_default()
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use CallKind::{HalfOpenTrial, Regular};

    #[test]
    fn breaker_opens_tries_and_closes() {
        let (mut breaker, start) = (Breaker::default(), Instant::now());
        for failure in 1..=FAILURES {
            assert_eq!(breaker.admit(start), Some(Regular));
            let changed = breaker.record(Regular, CallOutcome::Failed, start);
            assert_eq!(changed, (failure == FAILURES).then_some(true));
        }
        assert_eq!(breaker.admit(start), None);
        let later = start + FIRST;
        assert_eq!(breaker.admit(later), Some(HalfOpenTrial));
        assert_eq!(breaker.admit(later), None, "no second trial may begin during the first");
        assert_eq!(breaker.record(HalfOpenTrial, CallOutcome::Failed, later), None);
        assert_eq!(breaker.admit(later + FIRST), None, "the wait must double after a failed trial");
        assert_eq!(breaker.admit(later + 2 * FIRST), Some(HalfOpenTrial));
        assert_eq!(breaker.open_time(later), FIRST);
        let later = later + 2 * FIRST;
        assert_eq!(breaker.record(HalfOpenTrial, CallOutcome::Answered, later), Some(false));
        assert_eq!(breaker.admit(later), breaker.admit(later));
        assert_eq!((breaker.openings, breaker.open_time(later + LONGEST)), (1, 3 * FIRST));
        breaker.record(Regular, CallOutcome::Refused, later);
        assert_eq!((breaker.openings, breaker.open_time(later + FIRST)), (2, 4 * FIRST));
    }

    #[test]
    fn late_failures_do_not_extend_the_wait() {
        let (mut breaker, start) = (Breaker::default(), Instant::now());
        for _ in 0..20 + FAILURES {
            breaker.record(Regular, CallOutcome::Failed, start);
        }
        let later = start + FIRST;
        assert_eq!(breaker.admit(later), Some(HalfOpenTrial));
        breaker.record(Regular, CallOutcome::Failed, later);
        assert_eq!(breaker.admit(later + FIRST), None, "no call may be made during the trial");
        assert_eq!(breaker.record(Regular, CallOutcome::Answered, later), Some(false));
    }

    #[test]
    fn trial_without_outcome_is_replaced_after_longest_wait() {
        let (mut breaker, start) = (Breaker::default(), Instant::now());
        breaker.record(Regular, CallOutcome::Refused, start);
        let later = start + LONGEST;
        assert_eq!(breaker.admit(later), Some(HalfOpenTrial));
        assert_eq!(breaker.admit(later + LONGEST / 2), None);
        assert_eq!(breaker.admit(later + LONGEST), Some(HalfOpenTrial));
    }

    #[test]
    fn refusal_opens_breaker_for_longest_wait() {
        let (mut breaker, start) = (Breaker::default(), Instant::now());
        assert_eq!(breaker.record(Regular, CallOutcome::Refused, start), Some(true));
        assert_eq!(breaker.admit(start + LONGEST / 2), None);
        assert_eq!(breaker.admit(start + LONGEST), Some(HalfOpenTrial));
    }
}

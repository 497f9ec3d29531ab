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

/// Which call it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// One as any, of a remote that was thought to answer.
    Usual,
    /// The one that is to find out whether it answers again.
    Trial,
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
    /// Whether a call may be made, and if so which it is. Whoever may says what came of it; who was to find
    /// out and does not say so (nobody waited for the answer) is not waited for longer than anybody is.
    pub(super) fn admits(&mut self, now: Instant) -> Option<Call> {
        let Some((since, wait)) = self.open else { return Some(Call::Usual) };
        let silent = self.trying.is_none_or(|begun| now >= begun + LONGEST);
        (silent && now >= since + wait).then(|| {
            self.trying = Some(now);
            Call::Trial
        })
    }

    /// Whether it just opened, or just closed.
    pub(super) fn hear(&mut self, call: Call, verdict: Verdict, now: Instant) -> Option<bool> {
        if verdict == Verdict::Answered {
            (self.trying, self.failures) = (None, 0);
            return self.open.take().map(|_| false);
        }
        self.failures = self.failures.saturating_add(1);
        let enough = verdict == Verdict::Refused || self.failures >= FAILURES;
        let wait = match self.open {
            // Calls that were on their way when it opened say nothing new.
            Some(_) if call == Call::Usual => return None,
            Some((_, wait)) => (wait * 2).min(LONGEST),
            None if verdict == Verdict::Refused => LONGEST,
            None if enough => FIRST,
            None => return None,
        };
        self.trying = None;
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

    use Call::{Trial, Usual};

    #[test]
    fn it_opens_after_some_failures_tries_once_and_closes_with_an_answer() {
        let (mut breaker, start) = (Breaker::default(), Instant::now());
        for failure in 1..=FAILURES {
            assert_eq!(breaker.admits(start), Some(Usual));
            let changed = breaker.hear(Usual, Verdict::Failed, start);
            assert_eq!(changed, (failure == FAILURES).then_some(true));
        }
        assert_eq!(breaker.admits(start), None);
        let later = start + FIRST;
        assert_eq!(breaker.admits(later), Some(Trial));
        assert_eq!(breaker.admits(later), None, "one call at a time finds out");
        assert_eq!(breaker.hear(Trial, Verdict::Failed, later), None);
        assert_eq!(breaker.admits(later + FIRST), None, "it waits longer now");
        assert_eq!(breaker.admits(later + 2 * FIRST), Some(Trial));
        assert_eq!(breaker.hear(Trial, Verdict::Answered, later), Some(false));
        assert_eq!(breaker.admits(later), breaker.admits(later));
    }

    #[test]
    fn calls_that_were_on_their_way_when_it_opened_make_nobody_wait_longer() {
        let (mut breaker, start) = (Breaker::default(), Instant::now());
        for _ in 0..20 + FAILURES {
            breaker.hear(Usual, Verdict::Failed, start);
        }
        let later = start + FIRST;
        assert_eq!(breaker.admits(later), Some(Trial));
        breaker.hear(Usual, Verdict::Failed, later);
        assert_eq!(breaker.admits(later + FIRST), None, "the trial is still on its way");
        assert_eq!(breaker.hear(Usual, Verdict::Answered, later), Some(false));
    }

    #[test]
    fn a_trial_that_nobody_hears_of_does_not_close_the_remote_for_good() {
        let (mut breaker, start) = (Breaker::default(), Instant::now());
        breaker.hear(Usual, Verdict::Refused, start);
        let later = start + LONGEST;
        assert_eq!(breaker.admits(later), Some(Trial));
        assert_eq!(breaker.admits(later + LONGEST / 2), None);
        assert_eq!(breaker.admits(later + LONGEST), Some(Trial));
    }

    #[test]
    fn a_refusal_opens_it_at_once_and_for_long() {
        let (mut breaker, start) = (Breaker::default(), Instant::now());
        assert_eq!(breaker.hear(Usual, Verdict::Refused, start), Some(true));
        assert_eq!(breaker.admits(start + LONGEST / 2), None);
        assert_eq!(breaker.admits(start + LONGEST), Some(Trial));
    }
}

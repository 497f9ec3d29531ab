//! Which volumes complete no operations, although some are in flight.
//!
//! A process cannot cancel an operation that the kernel holds. A put therefore waits for its
//! operations even beyond its deadline. So does a get while the kernel writes to the memory of its
//! caller; otherwise it leaves its operations behind, with the memory that they use
//! ([`Stalls::leave`]). Calls submit no operation to a stalled volume, and their pages on it miss
//! immediately: only calls that submitted operations before the stall was detected wait, or leave
//! operations behind. As an exception, one test operation at a
//! time is submitted to a stalled volume, at most one in 30 seconds. The volume may work again
//! although an earlier operation hangs: if the test operation completes, the stall ends.
//!
//! An operation that was left behind is in flight until the kernel completes it, also after the
//! segments were closed, so each operation shares the ownership of [`Stalls`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Time without a completion after which a volume has stalled: longer than a busy disk or a busy
/// machine usually takes for one operation, and shorter than the time that a request can wait.
pub(super) const STALLED_AFTER: Duration = Duration::from_secs(2);
/// Minimum time from a volume's last progress ([`VolumeOps::progress`]) to its first test
/// operation, and between two test operations.
const PROBE_AFTER: Duration = Duration::from_secs(30);
/// Maximum number of lanes that have left operations behind; a get has one or several lanes. With
/// `io_uring`, each such lane has a ring and a thread.
const LEFT_MAX: usize = 64;

/// The operations of this process on each volume.
pub(crate) struct Stalls {
    opened: Instant,
    volumes: Box<[VolumeOps]>,
    /// Number of lanes that have left operations behind.
    left: AtomicUsize,
    /// Milliseconds that a unit test adds to the clock ([`Stalls::now`]).
    #[cfg(test)]
    waited: AtomicU64,
}

#[derive(Default)]
struct VolumeOps {
    in_flight: AtomicU32,
    /// Time, in milliseconds since `opened`, of the last completion, or of the last beginning of an
    /// operation while no other operation was in flight, if that is later.
    progress: AtomicU64,
    /// Whether a test operation is in flight.
    is_probed: AtomicBool,
    /// Time at which the last test operation began, in milliseconds since `opened`.
    probed: AtomicU64,
    is_logged: AtomicBool,
}

impl Stalls {
    pub(crate) fn new() -> Arc<Self> {
        let volumes = (0..=u8::MAX).map(|_| VolumeOps::default()).collect();
        Arc::new(Self {
            opened: Instant::now(),
            volumes,
            left: AtomicUsize::new(0),
            #[cfg(test)]
            waited: AtomicU64::default(),
        })
    }

    /// Permits a lane to leave its operations behind. `None` if 64 lanes have done so: the lane must
    /// wait. The lane counts until the result is dropped, which all these operations share.
    pub(crate) fn leave(self: &Arc<Self>) -> Option<LeftBehind> {
        let more = |left: usize| (left < LEFT_MAX).then_some(left + 1);
        self.left.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok()?;
        Some(LeftBehind(Arc::clone(self)))
    }

    /// Records an operation on `volume` that is in flight until the result is dropped. `None` if
    /// the volume has stalled and no test operation is due: the operation must not begin.
    pub(crate) fn begin(self: &Arc<Self>, volume: u8) -> Option<OpInFlight> {
        let ops = &self.volumes[usize::from(volume)];
        let is_probe = self.is_stalled(volume);
        if is_probe && !self.may_probe(ops) {
            return None;
        }
        // Store the time before counting the operation: an operation in flight with an old time
        // counts as a stall.
        if ops.in_flight.load(Ordering::Acquire) == 0 {
            ops.progress.fetch_max(self.now(), Ordering::AcqRel);
        }
        ops.in_flight.fetch_add(1, Ordering::AcqRel);
        Some(OpInFlight { stalls: Arc::clone(self), volume, is_probe, is_submitted: false })
    }

    /// Returns whether a test operation is due on a stalled volume and none is in flight. If so,
    /// records a test operation, which the caller must begin.
    fn may_probe(&self, ops: &VolumeOps) -> bool {
        let since = ops.probed.load(Ordering::Acquire).max(ops.progress.load(Ordering::Acquire));
        let is_due = self.now().saturating_sub(since) >= millis(PROBE_AFTER);
        let may = is_due && !ops.is_probed.swap(true, Ordering::AcqRel);
        if may {
            ops.probed.store(self.now(), Ordering::Release);
        }
        may
    }

    /// Whether `volume` has stalled.
    pub(crate) fn is_stalled(&self, volume: u8) -> bool {
        let ops = &self.volumes[usize::from(volume)];
        let is_stalled = self.silence(ops) >= STALLED_AFTER;
        if is_stalled && !ops.is_logged.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                volume,
                seconds = STALLED_AFTER.as_secs(),
                "a volume completes no operation: its pages are misses until it does; check its disk"
            );
        }
        is_stalled
    }

    /// The volumes that have stalled.
    pub(crate) fn stalled(&self) -> Vec<u8> {
        (0..=u8::MAX).filter(|volume| self.is_stalled(*volume)).collect()
    }

    /// For how long the volume that has been silent longest has completed nothing; zero if no
    /// operation is in flight.
    pub(crate) fn longest_silence(&self) -> Duration {
        self.volumes.iter().map(|ops| self.silence(ops)).max().unwrap_or_default()
    }

    /// For how long a volume has completed nothing; zero if no operation is in flight.
    fn silence(&self, ops: &VolumeOps) -> Duration {
        if ops.in_flight.load(Ordering::Acquire) == 0 {
            return Duration::ZERO;
        }
        Duration::from_millis(self.now().saturating_sub(ops.progress.load(Ordering::Acquire)))
    }

    fn now(&self) -> u64 {
        let now = millis(self.opened.elapsed());
        #[cfg(test)]
        let now = now + self.waited.load(Ordering::Relaxed);
        now
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A lane that has left operations behind.
pub(crate) struct LeftBehind(Arc<Stalls>);

impl Drop for LeftBehind {
    fn drop(&mut self) {
        self.0.left.fetch_sub(1, Ordering::AcqRel);
    }
}

/// An operation in flight.
pub(crate) struct OpInFlight {
    stalls: Arc<Stalls>,
    volume: u8,
    is_probe: bool,
    is_submitted: bool,
}

impl OpInFlight {
    /// Makes the end of the operation count as a completion of the volume. The end of an operation
    /// that was not submitted, for example because its file could not be opened, does not count.
    pub(crate) fn submitted(mut self) -> Self {
        self.is_submitted = true;
        self
    }

    /// Makes the end of the operation count as no completion: no code performed it.
    pub(crate) fn not_performed(&mut self) {
        self.is_submitted = false;
    }
}

impl Drop for OpInFlight {
    fn drop(&mut self) {
        let ops = &self.stalls.volumes[usize::from(self.volume)];
        if self.is_probe {
            ops.is_probed.store(false, Ordering::Release);
        }
        if self.is_submitted {
            ops.progress.fetch_max(self.stalls.now(), Ordering::AcqRel);
        }
        ops.in_flight.fetch_sub(1, Ordering::AcqRel);
        if !self.is_submitted {
            return;
        }
        if ops.is_logged.load(Ordering::Relaxed) && ops.is_logged.swap(false, Ordering::Relaxed) {
            tracing::warn!(self.volume, "the volume completes operations again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn submit(stalls: &Arc<Stalls>, volume: u8) -> OpInFlight {
        stalls.begin(volume).unwrap().submitted()
    }

    /// Advances the clock of `stalls` by `time`.
    fn wait(stalls: &Stalls, time: Duration) {
        stalls.waited.fetch_add(time.as_millis() as u64, Ordering::Relaxed);
    }

    #[test]
    fn volume_without_completions_has_stalled() {
        const SHORT: Duration = Duration::from_millis(300);
        let stalls = Stalls::new();
        wait(&stalls, STALLED_AFTER);
        assert_eq!(stalls.longest_silence(), Duration::ZERO, "no operation is in flight");
        let first = submit(&stalls, 3);
        assert!(!stalls.is_stalled(3), "the operation has just begun");
        wait(&stalls, SHORT);
        let second = submit(&stalls, 3);
        assert!(stalls.longest_silence() >= SHORT && !stalls.is_stalled(3));
        wait(&stalls, STALLED_AFTER);
        assert!(stalls.is_stalled(3) && !stalls.is_stalled(2));
        assert_eq!(stalls.stalled(), [3]);
        assert!(stalls.begin(3).is_none() && stalls.begin(2).is_some());
        drop(first);
        assert!(!stalls.is_stalled(3), "the volume completes operations");
        drop(stalls.begin(3));
        wait(&stalls, STALLED_AFTER);
        assert!(stalls.is_stalled(3), "the second operation is in flight");
        drop(second);
        wait(&stalls, STALLED_AFTER);
        assert!(!stalls.is_stalled(3) && stalls.longest_silence() == Duration::ZERO);
    }

    #[test]
    fn stalled_volume_gets_one_operation_at_a_time() {
        let stalls = Stalls::new();
        let _hangs = submit(&stalls, 0);
        wait(&stalls, PROBE_AFTER);
        let mut queued = submit(&stalls, 0);
        queued.not_performed();
        drop(queued);
        assert!(stalls.is_stalled(0), "the test operation was not performed");
        assert!(stalls.begin(0).is_none(), "the next test operation is not due");
        wait(&stalls, PROBE_AFTER);
        let probe = stalls.begin(0).unwrap();
        wait(&stalls, 2 * PROBE_AFTER);
        assert!(stalls.begin(0).is_none(), "a test operation is in flight");
        drop(probe);
        assert!(stalls.is_stalled(0), "the test operation was not submitted");
        drop(submit(&stalls, 0));
        assert!(!stalls.is_stalled(0), "only the first operation hangs");
        let _others = [submit(&stalls, 0), submit(&stalls, 0)];
        wait(&stalls, STALLED_AFTER);
        assert!(stalls.begin(0).is_none(), "the next test operation is not due");
    }

    #[test]
    fn calls_that_leave_operations_behind_are_limited() {
        let stalls = Stalls::new();
        let mut left: Vec<LeftBehind> = (0..LEFT_MAX).map(|_| stalls.leave().unwrap()).collect();
        assert!(stalls.leave().is_none());
        left.pop();
        assert!(stalls.leave().is_some() && stalls.leave().is_some());
    }
}

//! Observations of a store that several requests share.

use crate::drive::Drives;
use crate::limits::{
    ABANDONED_MAX, OBSERVATION_ABANDONED, OBSERVATION_SHARED, OBSERVATION_TIMEOUT,
};
use crate::problem::Problem;
use crate::store_access::StoreAccess;
use parking_lot::Mutex;
use ritornello_format::Result;
use ritornello_node::Observed;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::time::timeout_at;

/// The state of a store, as found at one moment.
#[derive(Debug)]
pub(crate) struct Observation {
    /// The state of the store, or why it is unknown.
    pub(crate) observed: std::result::Result<Observed, Problem>,
    /// For each directory of the store that has a known drive: the directory, and the bytes that
    /// all programs wrote to the drive since the kernel attached it.
    pub(crate) drives: Vec<(String, u64)>,
    /// Duration of the observation, or how long it has hung.
    pub(crate) took: Duration,
}

type Look = dyn Fn() -> Result<Observed> + Send + Sync;

/// Observes one store. At most one observation that is not abandoned runs at a time; each
/// observation has a separate thread. The first observation that hangs is abandoned after a minute,
/// by the next request, which begins another observation: the path may lead to another disk by now,
/// while the thread of the abandoned observation waits for the former disk. Each abandoned
/// observation that still hangs doubles the time until the next is abandoned, so a disk that hangs
/// for a day holds at most 11 threads.
pub(crate) struct Observer {
    access: Arc<StoreAccess>,
    /// Returns the state of the store. May wait without a limit.
    look: Box<Look>,
    /// Time after which an observation that hangs is abandoned, if no abandoned observation still
    /// hangs.
    patience: Duration,
    state: Mutex<State>,
    drives: Drives,
    /// Number of observations that ended before they were abandoned.
    ended: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    /// Begin of the observation in progress that is not abandoned; `None` if there is none.
    running: Option<Instant>,
    /// Number of abandoned observations that still hang.
    abandoned: u32,
    /// The last observation, and the time at which it ended.
    last: Option<(Instant, Arc<Observation>)>,
}

impl State {
    /// Returns the begin of the observation in progress. Abandons this observation if it has hung
    /// for too long and fewer than [`ABANDONED_MAX`] observations are abandoned. Returns `None` if
    /// no observation is in progress any longer: the caller begins one.
    fn in_progress(&mut self, patience: Duration) -> Option<Instant> {
        let begun = self.running?;
        if self.abandoned >= ABANDONED_MAX || begun.elapsed() < patience * (1 << self.abandoned) {
            return Some(begun);
        }
        self.abandoned += 1;
        self.running = None;
        None
    }
}

impl Observer {
    pub(crate) fn new(access: Arc<StoreAccess>) -> Arc<Self> {
        let observed = Arc::clone(&access);
        Self::with(access, Box::new(move || observed.observe()), OBSERVATION_ABANDONED)
    }

    fn with(access: Arc<StoreAccess>, look: Box<Look>, patience: Duration) -> Arc<Self> {
        let ended = watch::Sender::new(0);
        Arc::new(Self {
            access,
            look,
            patience,
            state: Mutex::default(),
            drives: Drives::default(),
            ended,
        })
    }

    /// The store.
    pub(crate) fn access(&self) -> &Arc<StoreAccess> {
        &self.access
    }

    /// Returns an observation that ended at most [`OBSERVATION_SHARED`] ago or during the call, or
    /// after [`OBSERVATION_TIMEOUT`] a failed observation. Begins an observation if none has ended
    /// so recently and none is in progress.
    pub(crate) async fn current(self: &Arc<Self>) -> Arc<Observation> {
        self.within(OBSERVATION_TIMEOUT).await
    }

    async fn within(self: &Arc<Self>, timeout: Duration) -> Arc<Observation> {
        let deadline = Instant::now() + timeout;
        let mut ended = self.ended.subscribe();
        let begun = {
            let mut state = self.state.lock();
            if let Some((at, last)) = &state.last
                && at.elapsed() < OBSERVATION_SHARED
            {
                return Arc::clone(last);
            }
            match state.in_progress(self.patience) {
                Some(begun) => begun,
                None => {
                    let begun = Instant::now();
                    state.running = Some(begun);
                    drop(state);
                    self.begin(begun);
                    begun
                }
            }
        };
        if timeout_at(deadline.into(), ended.changed()).await.is_ok()
            && let Some((_, last)) = &self.state.lock().last
        {
            return Arc::clone(last);
        }
        Arc::new(self.late(begun))
    }

    /// Starts the thread of an observation.
    fn begin(self: &Arc<Self>, begun: Instant) {
        // Dropping `end` ends the observation, even if the observation panics or its thread cannot
        // be started: otherwise requests would wait for it in vain until it is abandoned.
        let end = End { observer: Arc::clone(self), begun, observed: None, drives: Vec::new() };
        // Do not use tokio's thread pool: it panics if its first thread cannot be started.
        let started =
            std::thread::Builder::new().name("ritornello-http-look".to_owned()).spawn(move || {
                let mut end = end;
                let observed = (end.observer.look)();
                let dirs = observed.as_ref().map(present_dirs).unwrap_or_default();
                end.drives = end.observer.drives.written_bytes(&dirs);
                end.observed = Some(observed.map_err(|error| Problem::from(&error)));
                let observer = Arc::clone(&end.observer);
                drop(end);
                // A later observation shows the drives that are found now: a disk that hangs must
                // not delay this observation.
                observer.drives.find(observer.access.dir(), &dirs);
            });
        if let Err(error) = started {
            tracing::warn!(%error, store = self.access.name(), "the store cannot be observed now");
        }
    }

    fn late(&self, begun: Instant) -> Observation {
        let took = begun.elapsed();
        let mut message = format!(
            "the store has not answered for {:.1} s: its disk or its owner hangs; `ritornello \
             doctor DIR` shows details [dir={}]",
            took.as_secs_f64(),
            self.access.name(),
        );
        // An observation also waits while this process closes a store that it could not take over,
        // or opens it again.
        if let Some(failure) = self.access.failure() {
            message = format!("{failure}; {message}");
        }
        Observation { observed: Err(Problem::retry(message)), drives: Vec::new(), took }
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer").field("store", &self.access.name()).finish_non_exhaustive()
    }
}

/// Stores the result of an observation, and ends the observation, when this value is dropped.
struct End {
    observer: Arc<Observer>,
    begun: Instant,
    observed: Option<std::result::Result<Observed, Problem>>,
    drives: Vec<(String, u64)>,
}

/// The directories of the store that its owner can use.
fn present_dirs(observed: &Observed) -> Vec<String> {
    let Observed::Owned(stats) = observed else { return Vec::new() };
    let present = stats.paths.iter().filter(|volume| volume.absent.is_none());
    present.map(|volume| volume.dir.clone()).collect()
}

impl Drop for End {
    fn drop(&mut self) {
        let observed = self.observed.take().unwrap_or_else(|| {
            Err(Problem::retry(
                "the observation ended unexpectedly, or no thread could be started for it: see the \
                 log",
            ))
        });
        let mut state = self.observer.state.lock();
        if state.running != Some(self.begun) {
            // Drop the result: this observation was abandoned, and a later observation may have
            // ended.
            state.abandoned -= 1;
            return;
        }
        let drives = std::mem::take(&mut self.drives);
        let took = self.begun.elapsed();
        state.running = None;
        state.last = Some((Instant::now(), Arc::new(Observation { observed, drives, took })));
        drop(state);
        self.observer.ended.send_modify(|ended| *ended += 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::RwLock;
    use ritornello_format::Error;
    use std::path::Path;
    use std::sync::atomic::{AtomicU32, Ordering};
    use tokio::runtime::Builder;

    /// Time after which a hanging observation is abandoned: longer than any test runs.
    const PATIENCE: Duration = Duration::from_secs(3600);

    /// An observer. Its observations fail, and wait while `disk` is locked for writing. `begun`
    /// counts the observations.
    fn observer(disk: &Arc<RwLock<()>>, begun: &Arc<AtomicU32>) -> Arc<Observer> {
        let (disk, begun) = (Arc::clone(disk), Arc::clone(begun));
        let look = move || {
            begun.fetch_add(1, Ordering::Relaxed);
            let _disk = disk.read();
            Err(Error::retry("no store"))
        };
        Observer::with(StoreAccess::new(Path::new("/kv")), Box::new(look), PATIENCE)
    }

    fn message(observation: &Observation) -> String {
        observation.observed.as_ref().unwrap_err().message().to_owned()
    }

    #[test]
    fn hung_disk_holds_one_thread_and_each_request_for_its_deadline() {
        let (disk, begun) = (Arc::new(RwLock::new(())), Arc::new(AtomicU32::new(0)));
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        let observer = observer(&disk, &begun);
        let hung = disk.write();
        let timeout = Duration::from_millis(50);
        runtime.block_on(async {
            for _ in 0..3 {
                let late = observer.within(timeout).await;
                assert!(message(&late).contains("hangs") && message(&late).contains("dir=/kv"));
            }
            assert_eq!(begun.load(Ordering::Relaxed), 1);
            observer.access().set_failed("the index is damaged");
            let late = observer.within(timeout).await;
            let said = message(&late);
            assert!(said.contains("the index is damaged") && said.contains("hangs"), "{said}");
            observer.access().set_open(None);
            let late = observer.within(timeout).await;
            assert!(!message(&late).contains("the index is damaged"), "{late:?}");
            drop(hung);
            let answered = observer.within(Duration::from_secs(30)).await;
            assert_eq!(message(&answered), "no store");
            let shared = observer.within(Duration::from_secs(30)).await;
            assert!(Arc::ptr_eq(&answered, &shared) && begun.load(Ordering::Relaxed) == 1);
            tokio::time::sleep(OBSERVATION_SHARED).await;
            observer.within(Duration::from_secs(30)).await;
            assert_eq!(begun.load(Ordering::Relaxed), 2);
        });
    }

    #[test]
    fn store_is_observed_again_while_an_abandoned_observation_hangs() {
        let disk = Arc::new(RwLock::new(()));
        let (former, begun) = (Arc::clone(&disk), AtomicU32::new(0));
        let look = move || {
            if begun.fetch_add(1, Ordering::Relaxed) > 0 {
                return Err(Error::retry("the new disk"));
            }
            let _disk = former.read();
            Err(Error::retry("the former disk"))
        };
        let access = StoreAccess::new(Path::new("/kv"));
        let observer = Observer::with(access, Box::new(look), Duration::from_millis(200));
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        let hung = disk.write();
        runtime.block_on(async {
            let late = observer.within(Duration::from_millis(50)).await;
            assert!(message(&late).contains("hangs"), "{late:?}");
            tokio::time::sleep(Duration::from_millis(200)).await;
            let answered = observer.within(Duration::from_secs(30)).await;
            assert_eq!(message(&answered), "the new disk");
            assert_eq!(observer.state.lock().abandoned, 1);
            drop(hung);
            while observer.state.lock().abandoned > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            let last = observer.state.lock().last.clone();
            assert_eq!(message(&last.unwrap().1), "the new disk");
        });
    }

    #[test]
    fn observation_that_panics_ends() {
        let look = || panic!("a defect");
        let access = StoreAccess::new(Path::new("/kv"));
        let observer = Observer::with(access, Box::new(look), PATIENCE);
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        let ended = runtime.block_on(observer.within(Duration::from_secs(30)));
        assert!(message(&ended).contains("unexpectedly"));
    }
}

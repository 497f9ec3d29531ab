//! Observations of a store that several requests share.

use crate::limits::{OBSERVATION_SHARED, OBSERVATION_TIMEOUT};
use crate::problem::Problem;
use crate::store_access::StoreAccess;
use parking_lot::Mutex;
use ritornello_format::Result;
use ritornello_node::Observed;
use ritornello_store::CatalogStats;
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
    /// Pages that lookups missed since open, as counted by the owner; never less than in an earlier
    /// observation of the same opening.
    pub(crate) missed_pages: u64,
    /// Duration of the observation.
    pub(crate) took: Duration,
}

type Look = dyn Fn() -> Result<Observed> + Send + Sync;

/// Observes one store, on at most one thread at a time.
pub(crate) struct Observer {
    access: Arc<StoreAccess>,
    /// Returns the state of the store. May wait without a limit.
    look: Box<Look>,
    state: Mutex<State>,
    /// Number of observations that have ended.
    ended: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    /// Begin of the observation in progress.
    running: Option<Instant>,
    /// The last observation, and its end.
    last: Option<(Instant, Arc<Observation>)>,
    misses: Misses,
}

/// The highest number of missed pages of the current opening. The owner does not read its counters
/// of requested and of found pages at the same moment, so their difference may shrink by the pages
/// of a lookup. A counter of Prometheus must not shrink.
#[derive(Debug, Default)]
struct Misses {
    opening: (String, u32),
    pages: u64,
}

impl Misses {
    fn update(&mut self, stats: &CatalogStats) -> u64 {
        let counter = |name| stats.counters.get(name).copied().unwrap_or(0);
        let missed = counter("probed_pages").saturating_sub(counter("hit_pages"));
        let opening = (stats.uuid.clone(), stats.owner_epoch);
        if self.opening != opening {
            *self = Self { opening, pages: 0 };
        }
        self.pages = self.pages.max(missed);
        self.pages
    }
}

impl Observer {
    pub(crate) fn new(access: Arc<StoreAccess>) -> Arc<Self> {
        let observed = Arc::clone(&access);
        Self::with(access, Box::new(move || observed.observe()))
    }

    fn with(access: Arc<StoreAccess>, look: Box<Look>) -> Arc<Self> {
        let ended = watch::Sender::new(0);
        Arc::new(Self { access, look, state: Mutex::default(), ended })
    }

    /// The store.
    pub(crate) fn access(&self) -> &Arc<StoreAccess> {
        &self.access
    }

    /// Returns an observation that ended at most [`OBSERVATION_SHARED`] ago or during the call;
    /// after [`OBSERVATION_TIMEOUT`] a failed one. Begins an observation if none is in progress.
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
            match state.running {
                Some(begun) => begun,
                None => {
                    let begun = Instant::now();
                    state.running = Some(begun);
                    drop(state);
                    let observer = Arc::clone(self);
                    drop(tokio::task::spawn_blocking(move || observer.observe(begun)));
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

    fn observe(&self, begun: Instant) {
        // Ends the observation also if it panics: otherwise no other would begin.
        let mut end = End { observer: self, observation: None };
        let observed = (self.look)().map_err(|error| Problem::from(&error));
        let missed_pages = match &observed {
            Ok(Observed::Owned(stats)) => self.state.lock().misses.update(stats),
            _ => 0,
        };
        end.observation = Some(Observation { observed, missed_pages, took: begun.elapsed() });
    }

    fn late(&self, begun: Instant) -> Observation {
        let took = begun.elapsed();
        let message = format!(
            "the store has not answered for {:.1} s: its disk or its owner hangs; `ritornello \
             doctor DIR` shows details [dir={}]",
            took.as_secs_f64(),
            self.access.name(),
        );
        Observation { observed: Err(Problem::retry(message)), missed_pages: 0, took }
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer").field("store", &self.access.name()).finish_non_exhaustive()
    }
}

struct End<'a> {
    observer: &'a Observer,
    observation: Option<Observation>,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        let observation = self.observation.take().unwrap_or_else(|| Observation {
            observed: Err(Problem::retry("the observation ended unexpectedly: report this")),
            missed_pages: 0,
            took: Duration::ZERO,
        });
        let mut state = self.observer.state.lock();
        state.running = None;
        state.last = Some((Instant::now(), Arc::new(observation)));
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

    fn stats(epoch: u32, probed: u64, hit: u64) -> CatalogStats {
        let counters = [("probed_pages".to_owned(), probed), ("hit_pages".to_owned(), hit)];
        CatalogStats { owner_epoch: epoch, counters: counters.into(), ..CatalogStats::default() }
    }

    /// An observer whose observations fail, and wait while `disk` is locked for writing. Counts
    /// them in `begun`.
    fn observer(disk: &Arc<RwLock<()>>, begun: &Arc<AtomicU32>) -> Arc<Observer> {
        let (disk, begun) = (Arc::clone(disk), Arc::clone(begun));
        let look = move || {
            begun.fetch_add(1, Ordering::Relaxed);
            let _disk = disk.read();
            Err(Error::retry("no store"))
        };
        Observer::with(StoreAccess::new(Path::new("/kv")), Box::new(look))
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
    fn observation_that_panics_ends() {
        let look = || panic!("a defect");
        let observer = Observer::with(StoreAccess::new(Path::new("/kv")), Box::new(look));
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        let ended = runtime.block_on(observer.within(Duration::from_secs(30)));
        assert!(message(&ended).contains("unexpectedly"));
    }

    #[test]
    fn missed_pages_never_shrink_within_an_opening() {
        let mut misses = Misses::default();
        assert_eq!(misses.update(&stats(1, 10, 4)), 6);
        assert_eq!(misses.update(&stats(1, 10, 9)), 6);
        assert_eq!(misses.update(&stats(1, 20, 9)), 11);
        assert_eq!(misses.update(&stats(2, 3, 9)), 0);
        assert_eq!(misses.update(&stats(2, 5, 3)), 2);
    }
}

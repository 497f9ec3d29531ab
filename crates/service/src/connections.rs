//! The open connections, and which of them is closed to make place for a new connection.
//!
//! If new connections only waited for a place, a client that opens the maximum number of
//! connections and sends nothing would keep out every other client, also probes of health.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Time that a displaced connection has to end before another connection is displaced.
const DISPLACED_TIMEOUT: Duration = Duration::from_millis(50);

/// The open connections of a service.
#[derive(Debug)]
pub(crate) struct Connections {
    places: Arc<Semaphore>,
    /// Connections that are not displaced, by number: older connections have lower numbers.
    open: Arc<Mutex<BTreeMap<u64, Arc<Activity>>>>,
}

/// The state of a connection.
#[derive(Debug, Default)]
struct Activity {
    /// Whether a request of the connection is being answered, which begins when all of the request
    /// has arrived. The connection answers its requests one after another.
    is_answering: AtomicBool,
    displaced: Notify,
}

/// A connection. Gives its place back when it is dropped.
#[derive(Debug)]
pub(crate) struct Connection {
    number: u64,
    activity: Arc<Activity>,
    open: Arc<Mutex<BTreeMap<u64, Arc<Activity>>>>,
    _place: OwnedSemaphorePermit,
}

/// A request of a connection. Its answer is complete when this value is dropped.
#[derive(Debug)]
pub(crate) struct RequestGuard(Arc<Activity>);

/// Tells the connection of a request when the request's body has arrived.
#[derive(Debug)]
pub(crate) struct BodyArrival(Arc<Activity>);

impl Connections {
    /// Creates the set of connections, with places for at most `max` connections at a time.
    pub(crate) fn new(max: usize) -> Self {
        Self { places: Arc::new(Semaphore::new(max)), open: Arc::default() }
    }

    /// Returns a connection with this number, once a place is free for it. While all places are
    /// taken, displaces the oldest connection that answers no request, one in each
    /// [`DISPLACED_TIMEOUT`]; if there is none, waits.
    pub(crate) async fn admit(&self, number: u64) -> Connection {
        let place = loop {
            if let Ok(place) = Arc::clone(&self.places).try_acquire_owned() {
                break place;
            }
            self.displace_oldest();
            let freed = Arc::clone(&self.places).acquire_owned();
            if let Ok(Ok(place)) = timeout(DISPLACED_TIMEOUT, freed).await {
                break place;
            }
        };
        let activity = Arc::<Activity>::default();
        self.open.lock().insert(number, Arc::clone(&activity));
        Connection { number, activity, open: Arc::clone(&self.open), _place: place }
    }

    fn displace_oldest(&self) {
        let mut open = self.open.lock();
        let is_idle = |activity: &Arc<Activity>| !activity.is_answering.load(Ordering::Relaxed);
        let oldest = open.iter().find(|(_, activity)| is_idle(activity));
        if let Some(number) = oldest.map(|(number, _)| *number)
            && let Some(activity) = open.remove(&number)
        {
            activity.displaced.notify_one();
        }
    }
}

impl Connection {
    /// Begins a request. The connection counts as answering the request from
    /// [`BodyArrival::complete`] until the guard is dropped. Before that it may be displaced:
    /// otherwise clients that never send the rest of a body could hold all places. The caller drops
    /// the arrival of a request during which the connection may be displaced.
    pub(crate) fn begin_request(&self) -> (RequestGuard, BodyArrival) {
        (RequestGuard(Arc::clone(&self.activity)), BodyArrival(Arc::clone(&self.activity)))
    }

    /// Returns when the connection must be closed, because another connection takes its place.
    pub(crate) async fn displaced(&self) {
        self.activity.displaced.notified().await;
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.open.lock().remove(&self.number);
    }
}

impl BodyArrival {
    /// All of the request has arrived.
    pub(crate) fn complete(&self) {
        self.0.is_answering.store(true, Ordering::Relaxed);
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.is_answering.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::runtime::Builder;

    #[test]
    fn oldest_connection_without_request_is_displaced() {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let connections = Connections::new(3);
            let first = connections.admit(1).await;
            let second = connections.admit(2).await;
            let third = connections.admit(3).await;
            let (answering, arrival) = first.begin_request();
            arrival.complete();
            let displaced = async {
                second.displaced().await;
                drop(second);
            };
            let (fourth, ()) = tokio::join!(connections.admit(4), displaced);
            assert_eq!(connections.open.lock().keys().copied().collect::<Vec<_>>(), [1, 3, 4]);
            drop((third, fourth));
            drop(answering);
            assert!(!first.activity.is_answering.load(Ordering::Relaxed));
        });
    }

    #[test]
    fn connection_with_unfinished_body_is_displaced() {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let connections = Connections::new(1);
            let first = connections.admit(1).await;
            let (_answering, _arrival) = first.begin_request();
            let displaced = async {
                first.displaced().await;
                drop(first);
            };
            let admitted = async { tokio::join!(connections.admit(2), displaced) };
            assert!(timeout(Duration::from_secs(30), admitted).await.is_ok());
        });
    }

    #[test]
    fn admission_waits_while_all_connections_answer_requests() {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let connections = Connections::new(1);
            let first = connections.admit(1).await;
            let (answering, arrival) = first.begin_request();
            arrival.complete();
            let admitted = timeout(4 * DISPLACED_TIMEOUT, connections.admit(2)).await;
            assert!(admitted.is_err(), "{admitted:?}");
            drop(answering);
            let displaced = async {
                first.displaced().await;
                drop(first);
            };
            tokio::join!(connections.admit(3), displaced);
        });
    }
}

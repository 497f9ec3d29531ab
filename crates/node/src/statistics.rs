//! The owner's statistics for observers, computed by at most one thread at a time.
//!
//! A computation visits all runs and may wait for a slow disk. Observers that ask during a
//! computation share the next computation, so the owner's work is bounded however many observers
//! ask.

use parking_lot::Mutex;
use ritornello_format::{Error, Result};
use ritornello_store::CatalogStats;
use std::time::{Duration, Instant};

/// Maximum time to wait for another thread's computation. An observer waits 30 seconds for its
/// answer, so it receives the error of this timeout.
const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

/// The last statistics and the time at which their computation began. The lock is held during a
/// computation.
#[derive(Default)]
pub(crate) struct Statistics(Mutex<Option<(Instant, CatalogStats)>>);

impl Statistics {
    /// Returns statistics whose computation begins after the call, so they show all changes that
    /// were acknowledged before the call.
    ///
    /// # Errors
    /// `Retry` if another thread's computation takes longer than [`WAIT_TIMEOUT`]; any error of
    /// `compute`.
    pub(crate) fn current(
        &self,
        compute: &dyn Fn() -> Result<CatalogStats>,
    ) -> Result<CatalogStats> {
        self.since(Instant::now(), WAIT_TIMEOUT, compute)
    }

    fn since(
        &self,
        asked: Instant,
        timeout: Duration,
        compute: &dyn Fn() -> Result<CatalogStats>,
    ) -> Result<CatalogStats> {
        let Some(mut last) = self.0.try_lock_for(timeout) else {
            return Err(Error::retry(
                "the store's owner still computes its statistics for another command: its disk \
                 may be slow",
            )
            .with("waited_s", timeout.as_secs()));
        };
        if let Some((began, stats)) = &*last
            && *began >= asked
        {
            return Ok(stats.clone());
        }
        let began = Instant::now();
        let stats = compute()?;
        *last = Some((began, stats.clone()));
        Ok(stats)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authority::Authority;
    use crate::channel::{Channel, decode};
    use crate::greeting::{First, NEWEST};
    use crate::node_directory::NodeDirectory;
    use crate::presence::Presence;
    use crate::protocol::{Hello, HelloReply, OwnerEpoch};
    use crate::server::Server;
    use crate::socket::dial;
    use parking_lot::RwLock;
    use ritornello_format::{ScopeId, ScopeSlot};
    use ritornello_store::{Catalog, ClientId, Keys, Request, Response, ScopeRef};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn numbered(number: u32) -> CatalogStats {
        CatalogStats { owner_epoch: number, ..CatalogStats::default() }
    }

    #[test]
    fn only_observers_that_asked_before_a_computation_share_it() {
        let (statistics, computed) = (Statistics::default(), AtomicU32::new(0));
        let compute = || Ok(numbered(computed.fetch_add(1, Ordering::Relaxed)));
        let since = |asked| statistics.since(asked, WAIT_TIMEOUT, &compute).unwrap().owner_epoch;
        let asked = Instant::now();
        assert_eq!((since(asked), since(asked)), (0, 0));
        assert_eq!((since(Instant::now()), since(asked)), (1, 1));
        let _computing = statistics.0.lock();
        let short = Duration::from_millis(10);
        let error = statistics.since(Instant::now(), short, &compute).unwrap_err();
        assert!(error.to_string().contains("another command"), "{error}");
    }

    /// Computes statistics only when `disk` is not locked for writing. Their owner epoch is the
    /// number of computations already in progress.
    struct SlowDisk {
        disk: RwLock<()>,
        computing: AtomicU32,
    }

    /// Answers every request with a count of seven pages.
    struct SevenPages;

    impl Catalog for SevenPages {
        fn call(&self, _: &Request<'_>) -> Result<Response> {
            Ok(Response::Count(7))
        }
    }

    impl Authority for Arc<SlowDisk> {
        fn catalog_for(&self, _: ClientId, _: &str) -> Result<Arc<dyn Catalog>> {
            Ok(Arc::new(SevenPages))
        }

        fn stats(&self) -> Result<CatalogStats> {
            let most = self.computing.fetch_add(1, Ordering::Relaxed);
            let _disk = self.disk.read();
            self.computing.fetch_sub(1, Ordering::Relaxed);
            Ok(numbered(most))
        }

        fn client_disconnected(&self, _: ClientId) {}
    }

    fn wait_for_message(until: Instant) -> impl FnMut(bool) -> Result<()> {
        move |_| if Instant::now() < until { Ok(()) } else { Err(Error::retry("no message")) }
    }

    /// Connects and says `hello`.
    fn greeted(directory: &NodeDirectory, body: Hello, until: Instant) -> (Channel, HelloReply) {
        let stream = dial(directory, Duration::from_secs(10)).unwrap().unwrap();
        let mut channel = Channel::new(Arc::new(stream), Duration::from_millis(10)).unwrap();
        channel.stage(&First { version: NEWEST, body }).unwrap();
        channel.send(&mut wait_for_message(until)).unwrap();
        let reply = channel.receive(&mut wait_for_message(until)).unwrap().unwrap();
        let reply = First::<HelloReply>::read(reply, NEWEST..=NEWEST, "the owner").unwrap().body;
        (channel, reply)
    }

    #[test]
    fn observers_of_a_slow_owner_keep_no_client_out() {
        // More connections than an owner holds of unauthenticated peers and observers together.
        const OBSERVERS: usize = 140;
        let until = Instant::now() + Duration::from_secs(15);
        let dir = tempfile::tempdir().unwrap();
        let directory = Arc::new(NodeDirectory::open(dir.path()).unwrap());
        let owner = Arc::new(SlowDisk { disk: RwLock::new(()), computing: AtomicU32::new(0) });
        let slow = owner.disk.write();
        let epoch = OwnerEpoch { store: [1; 16], owner: 1, clean: true, durable: false };
        let authority: Arc<dyn Authority> = Arc::new(Arc::clone(&owner));
        let mut server = Server::start(&directory, authority, &Arc::default(), epoch).unwrap();
        let mut waiting = Vec::new();
        for _ in 0..OBSERVERS {
            let (mut channel, reply) = greeted(&directory, Hello::observer(), until);
            if let HelloReply::Refused(fault) = reply {
                let error = Error::from(fault);
                assert!(error.to_string().contains("too many commands"), "{error}");
                continue;
            }
            channel.stage(&Request::Stats).unwrap();
            channel.send(&mut wait_for_message(until)).unwrap();
            waiting.push(channel);
        }
        assert_eq!(waiting.len(), 8);
        let presence = Presence::announce(&directory).unwrap();
        let hello = Hello::new(presence.name(), true);
        let (mut client, reply) = greeted(&directory, hello, until);
        assert_eq!(reply, HelloReply::Granted(epoch));
        let scope = ScopeRef {
            id: ScopeId([3; 16]),
            slot: ScopeSlot(1),
            page_bytes: 4096,
            chained: true,
            codec: 0,
        };
        client.stage(&Request::Probe { scope, keys: Keys::Listed(&[&[1; 8]]) }).unwrap();
        client.send(&mut wait_for_message(until)).unwrap();
        let answer = client.receive(&mut wait_for_message(until)).unwrap().unwrap();
        assert!(matches!(decode::<Response>(answer).unwrap(), Response::Count(7)));

        drop(slow);
        for mut channel in waiting {
            let answer = channel.receive(&mut wait_for_message(until)).unwrap().unwrap();
            let Response::Stats(stats) = decode::<Response>(answer).unwrap() else {
                panic!("the response must have statistics")
            };
            assert_eq!(stats.owner_epoch, 0, "two threads computed statistics at the same time");
        }
        drop(client);
        server.stop();
    }
}

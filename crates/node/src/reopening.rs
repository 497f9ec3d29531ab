//! The state of an owner between a poisoned core and the next core of the same process.
//!
//! The process keeps the directory's lock throughout, so that no client takes the store over. Calls
//! of this process return immediately. Requests for statistics get the last statistics of the
//! poisoned core; lookups, puts and gets miss; calls for which a miss would be a false answer fail
//! with `Retry`. Connections of clients are closed, and a connecting client receives the reason for
//! its refusal.

use crate::authority::Authority;
use crate::node_directory::NodeDirectory;
use crate::owner::Owner;
use crate::server::Server;
use parking_lot::Mutex;
use ritornello_format::{Error, Result};
use ritornello_store::{Catalog, CatalogStats, ClientId, StoreCore, StoreReopening};
use std::sync::{Arc, Weak};

/// The state of an owner whose poisoned core is closed, or about to be closed, and whose next core
/// is not open yet.
pub(crate) struct Reopening {
    cause: String,
    /// The last statistics of the poisoned core, which include the cause.
    stats: Box<CatalogStats>,
    /// The owner with the poisoned core, until it is closed.
    former: Mutex<Option<Arc<Owner>>>,
    core: Weak<StoreCore>,
    refusing: Mutex<Option<Server>>,
}

/// Refuses every client with the failure that poisoned the core, as an error of kind `Miss`: other
/// refusals have other kinds. Gives observers the last statistics of the poisoned core.
struct RefusingAuthority {
    cause: String,
    stats: Box<CatalogStats>,
}

impl Authority for RefusingAuthority {
    fn admit(&self) -> Result<()> {
        Err(Error::miss(self.cause.clone()))
    }

    fn catalog_for(&self, _: ClientId, _: &str) -> Result<Arc<dyn Catalog>> {
        Err(Error::miss(self.cause.clone()))
    }

    fn stats(&self) -> Result<CatalogStats> {
        Ok(CatalogStats::clone(&self.stats))
    }

    fn client_disconnected(&self, _: ClientId) {}
}

impl Reopening {
    /// Creates the state that follows `former`, whose core is poisoned. The caller has ensured that
    /// no reservation of this process is pending.
    pub(crate) fn new(former: &Arc<Owner>, stats: CatalogStats) -> Self {
        let cause = stats.poisoned.clone().unwrap_or_default();
        let core = Arc::downgrade(&former.core);
        let former = Mutex::new(Some(Arc::clone(former)));
        Self { cause, stats: Box::new(stats), former, core, refusing: Mutex::new(None) }
    }

    /// The failure that poisoned the store.
    pub(crate) fn cause(&self) -> &str {
        &self.cause
    }

    /// Returns the error for calls in this state.
    pub(crate) fn error(&self) -> Error {
        StoreReopening::error(&self.cause)
    }

    /// The last statistics of the poisoned core.
    pub(crate) fn stats(&self) -> CatalogStats {
        CatalogStats::clone(&self.stats)
    }

    /// Closes all connections and the poisoned core. When this returns `Ok`, no call is inside the
    /// core, and the core's index has closed its files. Idempotent.
    ///
    /// # Errors
    /// `Retry` if a call, a write or a drain has not ended.
    pub(crate) fn end_former(&self, directory: &Arc<NodeDirectory>) -> Result<()> {
        let mut former = self.former.lock();
        if let Some(owner) = &*former {
            self.refuse(directory, owner);
            // The inner result is ignored: a sync or write of this core has failed before.
            drop(owner.close()?);
        }
        *former = None;
        if self.core.strong_count() > 0 {
            return Err(Error::retry("a call or a drain still uses the failed store"));
        }
        Ok(())
    }

    /// Starts a server that refuses clients, in place of the server that is about to stop. Without
    /// this server clients would find that no process listens, and would wait as for an owner that
    /// starts.
    fn refuse(&self, directory: &Arc<NodeDirectory>, former: &Owner) {
        let mut refusing = self.refusing.lock();
        if refusing.is_some() {
            return;
        }
        let (cause, stats) = (self.cause.clone(), self.stats.clone());
        let authority = Arc::new(RefusingAuthority { cause, stats });
        // This server checks no permissions, because it admits no client.
        match Server::start(directory, authority, &Arc::default(), former.epoch) {
            Ok(server) => *refusing = Some(server),
            Err(error) => {
                tracing::debug!(%error, "cannot start the server that refuses clients")
            }
        }
    }

    /// Stops the server that refuses clients, because the reopened owner listens or this process
    /// gives the store up.
    pub(crate) fn stop_refusing(&self) {
        if let Some(mut server) = self.refusing.lock().take() {
            server.stop();
        }
    }

    /// Gives up reopening. The store stays as the failure left it, for the next owner.
    ///
    /// # Errors
    /// Any error of [`Owner::close`]. The inner result is always an error: it names the failure
    /// that poisoned the store.
    pub(crate) fn close(&self) -> Result<Result<()>> {
        if let Some(owner) = &*self.former.lock() {
            drop(owner.close()?);
        }
        self.stop_refusing();
        Ok(Err(Error::fatal(
            "the store was closed before it was reopened after a failed write or sync: puts and \
             deletes since the last flush may be lost",
        )
        .with("cause", &self.cause)))
    }
}

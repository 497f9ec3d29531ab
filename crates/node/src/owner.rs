//! The state of a process that owns a store.
//!
//! An owner that closes removes its socket file only after everything is durable. A leftover socket
//! file therefore says that its owner died, or failed to make everything durable when it closed,
//! and that the puts of its last seconds may be lost.

use crate::authority::Authority;
use crate::open_context::OpenContext;
use crate::presence;
use crate::protocol::OwnerEpoch;
use crate::server::Server;
use crate::socket;
use parking_lot::Mutex;
use ritornello_format::{Error, Result};
use ritornello_store::{Catalog, ClientAlive, ClientId, Durability, LocalCatalog, StoreCore};
use std::sync::Arc;

/// The core, this process's catalog on it, and the server for client processes.
pub(crate) struct Owner {
    pub(crate) core: Arc<StoreCore>,
    /// This process's own catalog.
    pub(crate) catalog: LocalCatalog,
    pub(crate) epoch: OwnerEpoch,
    server: Mutex<Option<Server>>,
}

impl Owner {
    /// Opens the store and listens. The caller holds the directory's lock.
    pub(crate) fn open(opening: &OpenContext) -> Result<Self> {
        Self::serve(opening, Self::open_core(opening)?)
    }

    /// Like [`Owner::open`], after the process has closed a poisoned core. The new core is used
    /// only if it could sync the recovered state.
    pub(crate) fn reopen(opening: &OpenContext) -> Result<Self> {
        let core = Self::open_core(opening)?;
        if let Err(error) = core.catalog_for(ClientId::LOCAL, "").flush() {
            core.discard();
            return Err(error);
        }
        Self::serve(opening, core)
    }

    fn open_core(opening: &OpenContext) -> Result<Arc<StoreCore>> {
        let (looked_at, heal_signal) =
            (Arc::clone(&opening.directory), Arc::clone(&opening.heal_signal));
        let alive: ClientAlive = Arc::new(move |name| presence::is_alive(&looked_at, name));
        let core = StoreCore::open(Arc::clone(&opening.medium), &opening.options, alive)?;
        core.on_poison(Box::new(move || heal_signal.notify()));
        Ok(core)
    }

    fn serve(opening: &OpenContext, core: Arc<StoreCore>) -> Result<Self> {
        let (directory, options) = (&opening.directory, &opening.options);
        let authority: Arc<dyn Authority> = Arc::new(Arc::clone(&core));
        let manifest = core.manifest();
        let epoch = OwnerEpoch {
            store: manifest.uuid,
            owner: manifest.owner_epoch,
            clean: socket::present(directory).is_none(),
            durable: options.durability == Durability::Durable,
        };
        match Server::start(directory, authority, &opening.permissions, epoch) {
            Ok(server) => Ok(Self {
                epoch,
                catalog: core.catalog_for(ClientId::LOCAL, ""),
                core,
                server: Mutex::new(Some(server)),
            }),
            Err(error) => {
                core.discard();
                Err(error)
            }
        }
    }

    /// Closes all client connections, so that clients fail over, and closes the core. The inner
    /// result is the result of [`StoreCore::close`]: an error if the last changes may not be
    /// durable. The core refuses calls afterwards in any case.
    ///
    /// # Errors
    /// `Retry` if a disk does not answer, and the core still writes or a client's call is stuck in
    /// it: no other process may own the directory before the writes and the call have ended.
    pub(crate) fn close(&self) -> Result<Result<()>> {
        let mut server = self.server.lock();
        if let Some(server) = server.as_mut() {
            server.stop();
        }
        let closed = self.core.close();
        if self.core.is_writing() {
            let busy = Error::retry("a write to a disk does not end: close again later");
            return Err(match closed {
                Err(error) => busy.because(error),
                Ok(()) => busy,
            });
        }
        if !server.as_ref().is_none_or(Server::wait_until_idle) {
            return Err(Error::retry("a call of another process does not end: close again later"));
        }
        if let Some(server) = server.take()
            && closed.is_ok()
        {
            server.unpublish();
        }
        Ok(closed)
    }
}

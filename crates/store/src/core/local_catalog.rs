//! The owner's [`Catalog`] for one client.

use super::StoreCore;
use super::miss_causes::MissCause;
use crate::catalog::{Catalog, Request, Response};
use crate::client_id::ClientId;
use ritornello_format::{Error, Result};
use std::sync::Arc;
use std::time::Duration;

/// Maximum time that a call waits for a capacity change; the change then continues in the
/// background.
const CAPACITY_CHANGE_TIMEOUT: Duration = Duration::from_secs(240);

/// The catalog of one client, in the owner's process.
#[derive(Clone, Debug)]
pub struct LocalCatalog {
    core: Arc<StoreCore>,
    client: ClientId,
}

impl StoreCore {
    /// Returns a catalog for one client. `name` is the name of the client's lock file, or empty for
    /// the owner's process.
    #[must_use]
    pub fn catalog_for(self: &Arc<Self>, client: ClientId, name: &str) -> LocalCatalog {
        self.state.lock().reservations.connect(client, name);
        LocalCatalog { core: Arc::clone(self), client }
    }

    /// Handles the disconnection of a client: its leases end, and the space of its reservations
    /// is withheld until its process is proven dead, or until a client with its name, or the
    /// owner's process, aborts the reservations.
    pub fn client_left(&self, client: ClientId) {
        let mut state = self.state.lock();
        let freed = state.leases.drop_client(client);
        state.space.add_to_limbo(freed);
        let pages = state.reservations.disconnect(client);
        // Recorded under the lock: an explanation that finds no reservation finds the cause.
        self.miss_causes.note(pages, MissCause::Abandoned);
        drop(state);
        self.queues.client_left(client);
        self.maintenance.wake_periodic();
    }
}

impl Catalog for LocalCatalog {
    fn call(&self, request: &Request<'_>) -> Result<Response> {
        let (core, client) = (&self.core, self.client);
        let done = |()| Response::Done;
        // A poisoned store may accept the same change after it is reopened.
        let retryable = |error: Error| core.lifecycle.retryable(error);
        match *request {
            Request::Resolve { ref scope, create } => {
                core.resolve(scope, create).map(Response::Scope)
            }
            Request::Probe { scope, keys } => core.probe(scope, &keys.list()?).map(Response::Count),
            Request::Lease { ref scopes, keys, ttl } => {
                core.lease(client, scopes, &keys.list()?, ttl).map(Response::Leased)
            }
            Request::Release { lease } => {
                core.release(client, lease);
                Ok(Response::Done)
            }
            Request::BeginRead { scope, keys } => {
                core.locate(client, scope, &keys.list()?).map(Response::Located)
            }
            Request::Exists { scope, keys } => {
                core.exists(scope, &keys.list()?).map(Response::Exists)
            }
            Request::Reserve { scope, keys, parent, ref reserve_request } => {
                let reserved = core.reserve(client, scope, &keys.list()?, parent, reserve_request);
                reserved.map(Response::Reserved).map_err(retryable)
            }
            Request::Commit { reservation, ref written } => {
                let committed = core.commit(client, reservation, written);
                committed.map(Response::Committed).map_err(retryable)
            }
            Request::Abort { reservation } => core.abort(client, reservation).map(done),
            Request::ReportDamage { scope, key, generation, reason } => {
                core.report_damage(scope, key, generation, reason).map(done)
            }
            Request::ReportSpeeds { ref speeds } => {
                core.state.lock().space.measured(speeds);
                Ok(Response::Done)
            }
            Request::ReportFailedWrites { reservation, ref volumes } => {
                core.report_failed_writes(client, reservation, volumes);
                Ok(Response::Done)
            }
            Request::ReportTransfers { ref counts } => {
                core.transfers.add(counts);
                Ok(Response::Done)
            }
            Request::Touch { scope, keys } => {
                core.touch(client, scope, &keys.list()?).map(Response::Count)
            }
            Request::Delete { scope, keys } => {
                core.delete(scope, &keys.list()?).map(Response::Count).map_err(retryable)
            }
            Request::DropScope { scope } => core.drop_scope(scope).map(done).map_err(retryable),
            Request::Configure { scope, settings } => {
                core.configure(scope, &settings).map(done).map_err(retryable)
            }
            Request::Scopes { from } => core.list_scopes(from).map(Response::Scopes),
            Request::Keys { scope, after, limit } => {
                core.list_keys(scope, after, limit).map(Response::Keys)
            }
            Request::ChangeCapacity { ref change } => {
                let changed = core.change_capacity(change, CAPACITY_CHANGE_TIMEOUT);
                changed.map(done).map_err(retryable)
            }
            Request::Clear => core.clear().map(done).map_err(retryable),
            Request::Flush => core.flush().map(done).map_err(retryable),
            Request::Explain { id, ref scope, keys } => {
                core.explain(id, scope.as_deref(), &keys.list()?).map(Response::Explained)
            }
            Request::ReportDecisions { ref decisions, dropped } => {
                core.decisions.add(decisions, dropped);
                Ok(Response::Done)
            }
            Request::Decisions { limit } => {
                core.list_decisions(limit as usize).map(Response::Decisions)
            }
            Request::ExplainRequest { request } => {
                core.explain_request(request).map(Response::RequestExplained)
            }
            Request::ReportQueues { ref lengths } => {
                core.queues.report(client, lengths);
                Ok(Response::Done)
            }
            Request::Stats => core.stats().map(Box::new).map(Response::Stats),
        }
    }
}

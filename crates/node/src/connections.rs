//! Connections to an owner: clients by name, each with its connections; observers, which ask for
//! the owner's statistics; and unauthenticated connections, over which no hello has arrived yet.
//!
//! Limits keep one peer from starving other peers: on the connections of a client, the names of a
//! process, and the memory for long messages. Observers and unauthenticated connections have
//! separate quotas. When the quota of observers is used up, further observers are refused. When the
//! quota of unauthenticated connections is used up, the oldest of them is closed.

use crate::authority::Authority;
use crate::channel::shut_down;
use crate::client;
use crate::memory_budget::{Grant, MemoryBudget};
use crate::statistics::Statistics;
use parking_lot::{Condvar, Mutex};
use ritornello_format::{Error, Result};
use ritornello_store::{Catalog, CatalogStats, ClientId};
use rustix::net::Shutdown;
use std::collections::{BTreeMap, HashMap};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum clients. A process may be several clients, each with its own name.
const CLIENTS_MAX: usize = 256;
/// Maximum connections over all clients. Each connection has a thread.
const CONNECTIONS_MAX: usize = 1024;
/// Maximum connections of one client: its pool, and the same number of connections that the client
/// gave up, with calls that the owner still answers.
const CONNECTIONS_PER_CLIENT_MAX: usize = 2 * client::CONNECTIONS_MAX;
/// Maximum names under which one process is connected; processes in other PID namespaces are not
/// limited. A process takes a new name with each owner, and keeps every name under which
/// reservations are pending.
const NAMES_PER_PROCESS_MAX: usize = 8;
/// Number of unauthenticated connections from which on each new connection shuts down the oldest
/// unauthenticated connection.
const UNAUTHENTICATED_MAX: usize = 64;
/// Maximum observers. Each has a thread, which may wait for the statistics.
const OBSERVERS_MAX: usize = 8;
/// Maximum bytes that the buffers for received messages of all clients take beyond 64 KiB per
/// connection. [`CLIENT_MESSAGE_BYTES_MAX`] is the maximum per client.
const MESSAGE_BYTES_TOTAL_MAX: usize = 256 << 20;
const CLIENT_MESSAGE_BYTES_MAX: usize = 64 << 20;

/// The connection table of an owner.
pub(crate) struct Connections {
    authority: Arc<dyn Authority>,
    statistics: Statistics,
    state: Mutex<State>,
    closed: Condvar,
    budget: Arc<MemoryBudget>,
}

#[derive(Default)]
struct State {
    clients: HashMap<String, ClientEntry>,
    /// Connections by number, oldest first.
    connections: BTreeMap<u64, Connection>,
    last_client: u64,
    last_connection: u64,
}

struct ClientEntry {
    id: ClientId,
    /// Process id, or zero if the process is in another PID namespace.
    pid: i32,
    catalog: Arc<dyn Catalog>,
    connections: usize,
    budget: Arc<MemoryBudget>,
}

struct Connection {
    stream: Arc<UnixStream>,
    peer: Peer,
}

/// The role of the process at the other end of a connection.
#[derive(PartialEq, Eq)]
enum Peer {
    Unauthenticated,
    Observer,
    /// A client, by its name.
    Client(String),
}

/// Removes its connection from the table when dropped, and with a client's last connection the
/// client.
pub(crate) struct ConnectionGuard {
    connections: Arc<Connections>,
    number: u64,
}

impl Connections {
    /// Creates an empty table.
    pub(crate) fn new(authority: Arc<dyn Authority>) -> Arc<Self> {
        let (state, closed, budget) =
            (Mutex::default(), Condvar::new(), MemoryBudget::new(MESSAGE_BYTES_TOTAL_MAX));
        Arc::new(Self { authority, statistics: Statistics::default(), state, closed, budget })
    }

    /// Registers an accepted connection, and shuts down the oldest unauthenticated connection if
    /// there are [`UNAUTHENTICATED_MAX`] or more. Returns `None` at twice this number: connections
    /// arrive faster than they end.
    pub(crate) fn accept(self: &Arc<Self>, stream: &Arc<UnixStream>) -> Option<ConnectionGuard> {
        let mut state = self.state.lock();
        let unauthenticated =
            || state.connections.values().filter(|other| other.peer == Peer::Unauthenticated);
        let count = unauthenticated().count();
        if count >= UNAUTHENTICATED_MAX
            && let Some(oldest) = unauthenticated().next()
        {
            shut_down(&oldest.stream, Shutdown::Both);
        }
        if count >= 2 * UNAUTHENTICATED_MAX {
            return None;
        }
        state.last_connection += 1;
        let number = state.last_connection;
        let stream = Arc::clone(stream);
        state.connections.insert(number, Connection { stream, peer: Peer::Unauthenticated });
        Some(ConnectionGuard { connections: Arc::clone(self), number })
    }

    /// Returns the names of all connected clients.
    pub(crate) fn names(&self) -> Vec<String> {
        self.state.lock().clients.keys().cloned().collect()
    }

    /// Shuts down all connections of a client.
    pub(crate) fn disconnect(&self, name: &str) {
        for connected in self.state.lock().connections.values() {
            if matches!(&connected.peer, Peer::Client(its) if its == name) {
                shut_down(&connected.stream, Shutdown::Both);
            }
        }
    }

    /// Shuts down all connections. With `Shutdown::Read` no further request arrives, but responses
    /// are still sent.
    pub(crate) fn shut_down_all(&self, how: Shutdown) {
        for connected in self.state.lock().connections.values() {
            shut_down(&connected.stream, how);
        }
    }

    /// Waits until every [`ConnectionGuard`] is dropped. Returns `false` on timeout.
    pub(crate) fn wait_until_empty(&self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        let mut state = self.state.lock();
        while !state.connections.is_empty() {
            if self.closed.wait_until(&mut state, until).timed_out() {
                return state.connections.is_empty();
            }
        }
        true
    }
}

impl ConnectionGuard {
    /// Assigns the connection to an observer.
    ///
    /// # Errors
    /// `Retry` if there are [`OBSERVERS_MAX`] observers.
    pub(crate) fn register_observer(&self) -> Result<()> {
        let mut state = self.connections.state.lock();
        let observers = state.connections.values().filter(|other| other.peer == Peer::Observer);
        if observers.count() >= OBSERVERS_MAX {
            return Err(Error::retry(
                "too many commands wait for the statistics of this store's owner, whose disk may \
                 be slow",
            )
            .with("commands", OBSERVERS_MAX));
        }
        if let Some(connected) = state.connections.get_mut(&self.number) {
            connected.peer = Peer::Observer;
        }
        Ok(())
    }

    /// Returns the statistics for an observer.
    ///
    /// # Errors
    /// Any error of [`Statistics::current`].
    pub(crate) fn statistics(&self) -> Result<CatalogStats> {
        let authority = self.connections.authority.as_ref();
        self.connections.statistics.current(&|| authority.stats())
    }

    /// Assigns the connection to the client `name`: a new client if `first`, otherwise a client
    /// that is connected already. Returns the client's catalog and a grant of memory for its long
    /// messages, or `None` if `first` is false and no such client is connected.
    ///
    /// # Errors
    /// `Retry` if there are too many clients or connections, or the process has too many names;
    /// `Invalid` if the name is taken; any error of [`Authority::admit`].
    pub(crate) fn register(
        &self,
        name: &str,
        pid: i32,
        first: bool,
    ) -> Result<Option<(Arc<dyn Catalog>, Grant)>> {
        self.connections.authority.admit()?;
        let mut state = self.connections.state.lock();
        let named: usize = state.clients.values().map(|client| client.connections).sum();
        if named >= CONNECTIONS_MAX {
            return Err(Error::retry(
                "too many connections to this store: let fewer processes use it",
            )
            .with("connections", CONNECTIONS_MAX));
        }
        if first {
            state.check_new_client(name, pid)?;
            state.last_client += 1;
            let id = ClientId(state.last_client);
            let catalog = self.connections.authority.catalog_for(id, name)?;
            let budget = MemoryBudget::new(CLIENT_MESSAGE_BYTES_MAX);
            state
                .clients
                .insert(name.to_owned(), ClientEntry { id, pid, catalog, connections: 0, budget });
        }
        let Some(client) = state.clients.get_mut(name) else { return Ok(None) };
        if client.connections >= CONNECTIONS_PER_CLIENT_MAX {
            return Err(Error::retry(
                "too many connections of one process to this store: wait until its calls have \
                 ended",
            )
            .with("connections", CONNECTIONS_PER_CLIENT_MAX));
        }
        client.connections += 1;
        let catalog = Arc::clone(&client.catalog);
        let budgets = vec![Arc::clone(&self.connections.budget), Arc::clone(&client.budget)];
        if let Some(connected) = state.connections.get_mut(&self.number) {
            connected.peer = Peer::Client(name.to_owned());
        }
        Ok(Some((catalog, Grant::of(budgets))))
    }
}

impl State {
    fn check_new_client(&self, name: &str, pid: i32) -> Result<()> {
        if self.clients.contains_key(name) {
            return Err(Error::invalid("a client of this name is already connected"));
        }
        if self.clients.len() >= CLIENTS_MAX {
            return Err(Error::retry(
                "too many processes use this store: close it in some of them",
            )
            .with("clients", CLIENTS_MAX));
        }
        let names = self.clients.values().filter(|client| pid > 0 && client.pid == pid).count();
        if names >= NAMES_PER_PROCESS_MAX {
            return Err(Error::retry(
                "one process uses this store under too many names: restart the process",
            )
            .with("pid", pid)
            .with("names", NAMES_PER_PROCESS_MAX));
        }
        Ok(())
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        let mut state = self.connections.state.lock();
        let peer = state.connections.remove(&self.number).map(|connected| connected.peer);
        if let Some(Peer::Client(name)) = peer
            && let Some(client) = state.clients.get_mut(&name)
        {
            client.connections -= 1;
            if client.connections == 0 {
                let id = client.id;
                state.clients.remove(&name);
                self.connections.authority.client_disconnected(id);
            }
        }
        drop(state);
        self.connections.closed.notify_all();
    }
}

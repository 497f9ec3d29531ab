//! Who is connected to an owner: clients by name, each with its connections, and strangers that
//! have not said who they are.
//!
//! Nobody takes what others need: strangers have places of their own, and when these are taken the
//! one that has been silent longest goes; a client has so many connections, a process so many
//! names, and long messages share a room, of which one client gets a part.

use crate::authority::Authority;
use crate::client;
use crate::memory_budget::{MemoryBudget, Grant};
use crate::socket::shut_down;
use parking_lot::{Condvar, Mutex};
use ritornello_format::{Error, Result};
use ritornello_store::{Catalog, ClientId};
use rustix::net::Shutdown;
use std::collections::{BTreeMap, HashMap};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Client processes at most.
const CLIENTS_MAX: usize = 256;
/// Connections at most, of all clients together. Each has a thread.
const CONNECTIONS_MAX: usize = 1024;
/// Of one client: what it needs, and as many that it gave up and that the owner still answers.
const CONNECTIONS_PER_CLIENT_MAX: usize = 2 * client::CONNECTIONS_MAX;
/// Names of one process: it takes a new one with each owner, and keeps those that it writes under.
const NAMES_PER_PROCESS_MAX: usize = 8;
/// Connections that have not said hello.
const UNAUTHENTICATED_MAX: usize = 64;
/// Bytes of long messages, of all clients and of one.
const MESSAGE_BYTES_TOTAL_MAX: usize = 256 << 20;
const CLIENT_MESSAGE_BYTES_MAX: usize = 64 << 20;

/// The guest book.
pub(crate) struct Guests {
    authority: Arc<dyn Authority>,
    book: Mutex<Book>,
    left: Condvar,
    room: Arc<MemoryBudget>,
}

#[derive(Default)]
struct Book {
    clients: HashMap<String, Guest>,
    /// By number: the oldest first.
    connections: BTreeMap<u64, Connected>,
    last_client: u64,
    last_connection: u64,
}

struct Guest {
    id: ClientId,
    /// Its process, or zero where that cannot be seen from here.
    pid: i32,
    session: Arc<dyn Catalog>,
    connections: usize,
    room: Arc<MemoryBudget>,
}

struct Connected {
    stream: Arc<UnixStream>,
    name: Option<String>,
}

/// One connection's entry, struck out when dropped.
pub(crate) struct Visit {
    guests: Arc<Guests>,
    number: u64,
}

impl Guests {
    /// Nobody is here yet.
    pub(crate) fn new(authority: Arc<dyn Authority>) -> Arc<Self> {
        let (book, left, room) = (Mutex::default(), Condvar::new(), MemoryBudget::new(MESSAGE_BYTES_TOTAL_MAX));
        Arc::new(Self { authority, book, left, room })
    }

    /// Enters a connection that was accepted; `None` if strangers come faster than they can be
    /// hung up on.
    pub(crate) fn arrive(self: &Arc<Self>, stream: &Arc<UnixStream>) -> Option<Visit> {
        let mut book = self.book.lock();
        let strangers = || book.connections.values().filter(|other| other.name.is_none());
        let count = strangers().count();
        if count >= UNAUTHENTICATED_MAX
            && let Some(oldest) = strangers().next()
        {
            shut_down(&oldest.stream, Shutdown::Both);
        }
        if count >= 2 * UNAUTHENTICATED_MAX {
            return None;
        }
        book.last_connection += 1;
        let number = book.last_connection;
        let stream = Arc::clone(stream);
        book.connections.insert(number, Connected { stream, name: None });
        Some(Visit { guests: Arc::clone(self), number })
    }

    /// Names of the clients that are connected.
    pub(crate) fn names(&self) -> Vec<String> {
        self.book.lock().clients.keys().cloned().collect()
    }

    /// Hangs up on a client.
    pub(crate) fn disconnect(&self, name: &str) {
        for connected in self.book.lock().connections.values() {
            if connected.name.as_deref() == Some(name) {
                shut_down(&connected.stream, Shutdown::Both);
            }
        }
    }

    /// Hangs up on everybody. With `Shutdown::Read` no further question comes in, but answers
    /// still go out.
    pub(crate) fn dismiss(&self, how: Shutdown) {
        for connected in self.book.lock().connections.values() {
            shut_down(&connected.stream, how);
        }
    }

    /// Waits until every connection's thread is done. Whether that came about in time.
    pub(crate) fn wait_until_gone(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let mut book = self.book.lock();
        while !book.connections.is_empty() {
            if self.left.wait_until(&mut book, until).timed_out() {
                return book.connections.is_empty();
            }
        }
        true
    }
}

impl Visit {
    /// Names the connection's client: a new one, or one that is here. Returns the client's
    /// catalog and the room for its long messages, or `None` if the client to be joined is gone.
    ///
    /// # Errors
    /// `Retry` if there are too many clients or connections, `Invalid` if the name is taken; those of
    /// [`Authority::admit`].
    pub(crate) fn introduce(
        &self,
        name: &str,
        pid: i32,
        first: bool,
    ) -> Result<Option<(Arc<dyn Catalog>, Grant)>> {
        self.guests.authority.admit()?;
        let mut book = self.guests.book.lock();
        let named: usize = book.clients.values().map(|guest| guest.connections).sum();
        if named >= CONNECTIONS_MAX {
            return Err(Error::retry("too many connections to this store")
                .with("connections", CONNECTIONS_MAX));
        }
        if first {
            book.check_newcomer(name, pid)?;
            book.last_client += 1;
            let id = ClientId(book.last_client);
            let session = self.guests.authority.session(id, name)?;
            let room = MemoryBudget::new(CLIENT_MESSAGE_BYTES_MAX);
            book.clients.insert(name.to_owned(), Guest { id, pid, session, connections: 0, room });
        }
        let Some(guest) = book.clients.get_mut(name) else { return Ok(None) };
        if guest.connections >= CONNECTIONS_PER_CLIENT_MAX {
            return Err(Error::retry("too many connections of one process to this store")
                .with("connections", CONNECTIONS_PER_CLIENT_MAX));
        }
        guest.connections += 1;
        let session = Arc::clone(&guest.session);
        let rooms = vec![Arc::clone(&self.guests.room), Arc::clone(&guest.room)];
        if let Some(connected) = book.connections.get_mut(&self.number) {
            connected.name = Some(name.to_owned());
        }
        Ok(Some((session, Grant::of(rooms))))
    }
}

impl Book {
    fn check_newcomer(&self, name: &str, pid: i32) -> Result<()> {
        if self.clients.contains_key(name) {
            return Err(Error::invalid("a client of this name is connected"));
        }
        if self.clients.len() >= CLIENTS_MAX {
            return Err(
                Error::retry("too many processes use this store").with("clients", CLIENTS_MAX)
            );
        }
        let names = self.clients.values().filter(|guest| pid > 0 && guest.pid == pid).count();
        if names >= NAMES_PER_PROCESS_MAX {
            return Err(Error::retry("one process uses this store under too many names")
                .with("pid", pid)
                .with("names", NAMES_PER_PROCESS_MAX));
        }
        Ok(())
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let mut book = self.guests.book.lock();
        let name = book.connections.remove(&self.number).and_then(|connected| connected.name);
        if let Some(name) = name
            && let Some(guest) = book.clients.get_mut(&name)
        {
            guest.connections -= 1;
            if guest.connections == 0 {
                let id = guest.id;
                book.clients.remove(&name);
                self.guests.authority.left(id);
            }
        }
        drop(book);
        self.guests.left.notify_all();
    }
}

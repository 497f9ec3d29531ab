//! Who is connected to an owner: clients by name, each with its connections.

use crate::authority::Authority;
use crate::socket::shut_down;
use parking_lot::{Condvar, Mutex};
use ritornello_format::{Error, Result};
use ritornello_store::{Catalog, ClientId};
use rustix::net::Shutdown;
use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Client processes at most.
const CLIENTS_MAX: usize = 256;
/// Connections at most, of all clients together. Each has a thread.
const CONNECTIONS_MAX: usize = 1024;

/// The guest book.
pub(crate) struct Guests {
    authority: Arc<dyn Authority>,
    book: Mutex<Book>,
    left: Condvar,
}

#[derive(Default)]
struct Book {
    clients: HashMap<String, Guest>,
    connections: HashMap<u64, Connected>,
    last_client: u64,
    last_connection: u64,
}

struct Guest {
    id: ClientId,
    session: Arc<dyn Catalog>,
    connections: usize,
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
        Arc::new(Self { authority, book: Mutex::default(), left: Condvar::new() })
    }

    /// Enters a connection that was accepted; `None` if there are too many.
    pub(crate) fn arrive(self: &Arc<Self>, stream: &Arc<UnixStream>) -> Option<Visit> {
        let mut book = self.book.lock();
        if book.connections.len() >= CONNECTIONS_MAX {
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
    /// catalog, or `None` if the client to be joined is gone.
    ///
    /// # Errors
    /// `Retry` if there are too many clients, `Invalid` if the name is taken.
    pub(crate) fn introduce(&self, name: &str, first: bool) -> Result<Option<Arc<dyn Catalog>>> {
        let mut book = self.guests.book.lock();
        if first {
            if book.clients.contains_key(name) {
                return Err(Error::invalid("a client of this name is connected"));
            }
            if book.clients.len() >= CLIENTS_MAX {
                return Err(
                    Error::retry("too many processes use this store").with("clients", CLIENTS_MAX)
                );
            }
            book.last_client += 1;
            let id = ClientId(book.last_client);
            let session = self.guests.authority.session(id, name);
            book.clients.insert(name.to_owned(), Guest { id, session, connections: 0 });
        }
        let Some(guest) = book.clients.get_mut(name) else { return Ok(None) };
        guest.connections += 1;
        let session = Arc::clone(&guest.session);
        if let Some(connected) = book.connections.get_mut(&self.number) {
            connected.name = Some(name.to_owned());
        }
        Ok(Some(session))
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

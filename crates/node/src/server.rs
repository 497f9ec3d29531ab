//! The owner's side of the socket: a thread that accepts connections, and one thread for each
//! connection.

use crate::authority::Authority;
use crate::channel::{Channel, decode};
use crate::connections::{ConnectionGuard, Connections};
use crate::greeting::{First, NEWEST, OLDEST};
use crate::memory_budget::Grant;
use crate::node_directory::NodeDirectory;
use crate::owner_lost::{is_owner_lost, owner_lost};
use crate::permissions::ClientPermissions;
use crate::presence;
use crate::protocol::{Hello, HelloReply, OwnerEpoch, RESERVE_TIMEOUT_MAX};
use crate::socket::{self, Listener};
use ritornello_format::{Error, FORMAT_VERSION, Result};
use ritornello_store::{Catalog, Leased, Located, Request, Response, WireError};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{Shutdown, SocketFlags, accept_with};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Maximum time to receive a peer's hello or an observer's request, and to send the reply to each.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time to receive a message after its first bytes, and to send a response.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum time for sending the reason why a connection is closed.
const REJECTION_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval at which a connection's thread checks its deadline; a wait may exceed its deadline by
/// this time.
const WAIT_SLICE: Duration = Duration::from_secs(5);
/// Interval of checks for dead clients whose connection a forked child keeps open.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Number of [`CHECK_INTERVAL`]s between two removals ([`presence::sweep`]) of the files that dead
/// clients left under `clients/`.
const SWEEP_CHECKS: u32 = 12;
/// Maximum time that a stopping server waits for the end of received calls, before it shuts down
/// the connections that remain.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum wait for the end of all connections after the core was closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(60);
/// The pause after a connection that could not be accepted or served, usually because no descriptor
/// or thread is free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// A listening owner.
pub(crate) struct Server {
    directory: Arc<NodeDirectory>,
    connections: Arc<Connections>,
    listener: Arc<Listener>,
    stop: Arc<OwnedFd>,
    acceptor: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens for clients and observers, whose requests `authority` answers. The caller holds the
    /// lock of `directory`.
    ///
    /// # Errors
    /// `Retry` if the socket cannot be created, or no descriptor or thread is free.
    pub(crate) fn start(
        directory: &Arc<NodeDirectory>,
        authority: Arc<dyn Authority>,
        permissions: &Arc<ClientPermissions>,
        epoch: OwnerEpoch,
    ) -> Result<Self> {
        presence::sweep(directory);
        socket::sweep(directory);
        let connections = Connections::new(authority);
        let listener = Arc::new(Listener::bind(directory)?);
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| no_thread(error.into()))?;
        let stop = Arc::new(stop);
        let acceptor = Acceptor {
            directory: Arc::clone(directory),
            connections: Arc::clone(&connections),
            permissions: Arc::clone(permissions),
            listener: Arc::clone(&listener),
            stop: Arc::clone(&stop),
            epoch,
        };
        let acceptor = std::thread::Builder::new()
            .name("ritornello-accept".to_owned())
            .spawn(move || acceptor.run())
            .map_err(no_thread)?;
        Ok(Self {
            directory: Arc::clone(directory),
            connections,
            listener,
            stop,
            acceptor: Some(acceptor),
        })
    }

    /// Stops listening, waits at most [`DRAIN_TIMEOUT`] for received calls, and shuts down all
    /// connections.
    pub(crate) fn stop(&mut self) {
        // A write to an eventfd can fail only by overflow, which the few calls of this function do
        // not reach.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(acceptor) = self.acceptor.take() {
            // A panic of the thread was reported when it happened.
            let _ = acceptor.join();
        }
        self.listener.shut();
        self.connections.shut_down_all(Shutdown::Read);
        if !self.connections.wait_until_empty(DRAIN_TIMEOUT) {
            self.connections.shut_down_all(Shutdown::Both);
        }
    }

    /// Removes the socket file, because the core was closed cleanly. A leftover file says that the
    /// core was not closed cleanly, see [`crate::owner`].
    pub(crate) fn unpublish(&self) {
        self.listener.unpublish(&self.directory);
    }

    /// Waits, after the core was closed, until all connections have ended, at most
    /// [`CLOSE_TIMEOUT`]. Returns `false` on timeout: a call may still be inside the core.
    pub(crate) fn wait_until_idle(&self) -> bool {
        self.connections.wait_until_empty(CLOSE_TIMEOUT)
    }
}

fn no_thread(error: std::io::Error) -> Error {
    Error::retry("the store's server cannot start: check the limits of threads and open files")
        .because(error)
}

struct Acceptor {
    directory: Arc<NodeDirectory>,
    connections: Arc<Connections>,
    permissions: Arc<ClientPermissions>,
    listener: Arc<Listener>,
    stop: Arc<OwnedFd>,
    epoch: OwnerEpoch,
}

impl Acceptor {
    fn run(&self) {
        let mut checks = 0u32;
        let mut next_check = Instant::now() + CHECK_INTERVAL;
        loop {
            let until = next_check.saturating_duration_since(Instant::now());
            let mut waited = [
                PollFd::new(&self.listener.socket, PollFlags::IN),
                PollFd::new(&*self.stop, PollFlags::IN),
            ];
            let ready = poll(&mut waited, Timespec::try_from(until).ok().as_ref());
            let [listening, stopping] = waited.map(|fd| !fd.revents().is_empty());
            if stopping {
                return;
            }
            if ready.is_ok() && listening && !self.accept() {
                let mut stop = [PollFd::new(&*self.stop, PollFlags::IN)];
                let _ = poll(&mut stop, Timespec::try_from(ACCEPT_PAUSE).ok().as_ref());
            }
            if Instant::now() >= next_check {
                next_check = Instant::now() + CHECK_INTERVAL;
                checks += 1;
                self.check_clients(checks);
            }
        }
    }

    fn accept(&self) -> bool {
        let stream = match accept_with(&self.listener.socket, SocketFlags::CLOEXEC) {
            Ok(stream) => Arc::new(UnixStream::from(stream)),
            Err(error) => {
                tracing::warn!(%error, "a client's connection could not be accepted");
                return false;
            }
        };
        let Some(guard) = self.connections.accept(&stream) else {
            tracing::warn!("too many unauthenticated connections: a new connection was closed");
            return false;
        };
        let (directory, epoch) = (Arc::clone(&self.directory), self.epoch);
        let permissions = Arc::clone(&self.permissions);
        let work = move || {
            if let Err(error) = serve_connection(&directory, epoch, &permissions, &guard, &stream) {
                tracing::debug!(%error, "a client's connection ended");
            }
        };
        let thread = std::thread::Builder::new().name("ritornello-client".to_owned());
        match thread.spawn(work) {
            Ok(_) => true,
            Err(error) => {
                tracing::warn!(%error, "a connection was closed: no thread can be started for it");
                false
            }
        }
    }

    fn check_clients(&self, checks: u32) {
        for name in self.connections.names() {
            if !presence::is_alive(&self.directory, &name) {
                self.connections.disconnect(&name);
            }
        }
        if checks.is_multiple_of(SWEEP_CHECKS) {
            presence::sweep(&self.directory);
        }
    }
}

/// The result of an accepted hello.
enum Admitted {
    /// A client, with the catalog that answers it, and its share of the memory for long messages.
    Client(Arc<dyn Catalog>, Grant),
    /// A process that asks for the owner's statistics and does not use the store.
    Observer,
}

/// Serves one connection from its hello to its end.
fn serve_connection(
    directory: &NodeDirectory,
    epoch: OwnerEpoch,
    permissions: &ClientPermissions,
    guard: &ConnectionGuard,
    stream: &Arc<UnixStream>,
) -> Result<()> {
    let pid = socket::check_peer(stream)?;
    let mut channel = Channel::new(Arc::clone(stream), WAIT_SLICE)?.unauthenticated();
    let Some(message) = channel.receive(&mut deadline(HELLO_TIMEOUT))? else { return Ok(()) };
    let hello = First::read(message, OLDEST..=NEWEST, "a process that uses this store");
    let version = hello.as_ref().map_or(NEWEST, |hello| hello.version);
    let (body, admitted) = match hello.and_then(|hello| admit(directory, guard, pid, &hello)) {
        Ok(Some(admitted)) => (HelloReply::Granted(epoch), Some(admitted)),
        Ok(None) => (HelloReply::Gone, None),
        Err(error) => (HelloReply::Refused(error.into()), None),
    };
    channel.stage(&First { version, body })?;
    channel.send(&mut deadline(HELLO_TIMEOUT))?;
    let served = match admitted {
        Some(Admitted::Client(catalog, grant)) => {
            channel.authenticate(grant);
            serve(catalog.as_ref(), permissions, &mut channel)
        }
        Some(Admitted::Observer) => answer_observer(guard, &mut channel),
        None => return Ok(()),
    };
    if let Err(error) = &served
        && !is_owner_lost(error)
    {
        // Send the reason why the connection is closed; the peer may have stopped reading.
        channel.stage(&Response::Failed(WireError::about(error)))?;
        channel.send(&mut deadline(REJECTION_TIMEOUT))?;
    }
    served
}

/// Answers the request of an observer, and ends its connection.
fn answer_observer(guard: &ConnectionGuard, channel: &mut Channel) -> Result<()> {
    let Some(message) = channel.receive(&mut deadline(HELLO_TIMEOUT))? else { return Ok(()) };
    let Request::Stats = decode(message)? else {
        return Err(Error::invalid("an observer may ask for statistics only"));
    };
    channel.stage(&Response::Stats(Box::new(guard.statistics()?)))?;
    // A part of the response may have been sent, so no other message can follow on this connection.
    channel.send(&mut deadline(HELLO_TIMEOUT)).map_err(|error| owner_lost(io::Error::other(error)))
}

/// Admits the sender of a hello as a client or an observer. Returns `None` if the hello joins a
/// client that is no longer connected.
fn admit(
    directory: &NodeDirectory,
    guard: &ConnectionGuard,
    pid: i32,
    First { version, body: hello }: &First<Hello>,
) -> Result<Option<Admitted>> {
    if hello.format != FORMAT_VERSION {
        return Err(Error::retry(
            "owner and client use different formats: upgrade the process with the lower format; \
             until then this client gets no hits and stores nothing",
        )
        .with("format", FORMAT_VERSION)
        .with("yours", hello.format));
    }
    if hello.is_observer(*version) {
        guard.register_observer()?;
        return Ok(Some(Admitted::Observer));
    }
    // The owner grants space only to a client that holds the lock on its name: the owner learns
    // from this lock when the client has died.
    if !presence::is_alive(directory, &hello.name) {
        return Err(Error::retry(
            "the client's file under clients/ is not locked: open the store again",
        )
        .with("pid", hello.pid));
    }
    tracing::debug!(client = %hello.name, pid = hello.pid, first = hello.first, "a client greeted");
    let registered = guard.register(&hello.name, pid, hello.first)?;
    Ok(registered.map(|(catalog, grant)| Admitted::Client(catalog, grant)))
}

fn serve(
    catalog: &dyn Catalog,
    permissions: &ClientPermissions,
    channel: &mut Channel,
) -> Result<()> {
    loop {
        let Some(message) = channel.receive(&mut idle_or_deadline())? else { return Ok(()) };
        let Some(response) = answer(catalog, permissions, decode(message)?) else { continue };
        if matches!(&response, Response::Failed(fault) if fault.is_closed()) {
            // The owner is closing, so it sends no response. The client fails over to the next
            // owner.
            return Ok(());
        }
        let sent = match channel.stage(&response) {
            Ok(()) => channel.send(&mut deadline(MESSAGE_TIMEOUT)),
            Err(error) => {
                channel.stage(&Response::Failed(error.into()))?;
                channel.send(&mut deadline(MESSAGE_TIMEOUT))?;
                // The client got an error instead of the response, so it does not know its
                // reservation or lease.
                undo_unsent(catalog, &response);
                continue;
            }
        };
        if let Err(error) = sent {
            undo_unsent(catalog, &response);
            // A part of the response may have been sent, so no other message can follow on this
            // connection.
            return Err(owner_lost(io::Error::other(error)));
        }
    }
}

/// Answers `request` by a call of `catalog`, if `permissions` allow clients to send the request.
/// Returns `None` for requests without a response.
pub(crate) fn answer(
    catalog: &dyn Catalog,
    permissions: &ClientPermissions,
    mut request: Request<'_>,
) -> Option<Response> {
    if let Request::Reserve { reserve_request, .. } = &mut request
        && reserve_request.timeout > RESERVE_TIMEOUT_MAX
    {
        reserve_request.to_mut().timeout = RESERVE_TIMEOUT_MAX;
    }
    let rule = request.rule();
    let called = permissions.check(&rule).and_then(|()| catalog.call(&request));
    rule.has_response.then(|| called.unwrap_or_else(|error| Response::Failed(error.into())))
}

/// Releases the space or the lease of a response that did not reach the client.
fn undo_unsent(catalog: &dyn Catalog, response: &Response) {
    let undone = match response {
        Response::Reserved(reserved) if !reserved.runs.is_empty() => catalog.abort(reserved.id),
        Response::Leased(Leased { lease, .. }) | Response::Located(Located { lease, .. }) => {
            catalog.release(*lease)
        }
        _ => return,
    };
    if let Err(error) = undone {
        tracing::warn!(
            %error,
            "a response was not sent, and its reservation or lease cannot be released: the space \
             stays in use until the client's process ends or the lease expires"
        );
    }
}

/// Returns a check that a [`Channel`] calls while it waits, and that fails after `time`.
fn deadline(time: Duration) -> impl FnMut(bool) -> Result<()> {
    let until = Instant::now() + time;
    move |_| if Instant::now() < until { Ok(()) } else { Err(timed_out()) }
}

/// Returns a check that a [`Channel`] calls while it waits: it permits any wait for the first byte
/// of a message, and at most [`MESSAGE_TIMEOUT`] for the rest of the message.
fn idle_or_deadline() -> impl FnMut(bool) -> Result<()> {
    let mut begun: Option<Instant> = None;
    move |partial| {
        let since = begun.filter(|_| partial).unwrap_or_else(Instant::now);
        begun = partial.then_some(since);
        if since.elapsed() < MESSAGE_TIMEOUT { Ok(()) } else { Err(timed_out()) }
    }
}

fn timed_out() -> Error {
    Error::retry("the peer did not send or read a message in time")
}

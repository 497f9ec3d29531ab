//! A client of one owner: a name, and a small pool of connections.

use crate::channel::{Channel, decode};
use crate::greeting::{First, OLDEST, OtherVersion};
use crate::handshake::{HANDSHAKE_TIMEOUT, dial, greet, handshake};
use crate::liveness::{OwnerLiveness, PROBE_AFTER};
use crate::node_directory::NodeDirectory;
use crate::owner_lost::{is_owner_lost, owner_lost};
use crate::presence::Presence;
use crate::protocol::{EXPLAINS_SINCE, Hello, OwnerEpoch, REPORTS_SINCE};
use crate::record_lock::LockHolder;
use parking_lot::{Condvar, Mutex};
use ritornello_format::{Error, ErrorKind, Result, check_keys};
use ritornello_store::rule::LaterCall;
use ritornello_store::{Keys, OwnerSilent, Request, Response};
use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Maximum connections in the pool of one client; a probe of the owner opens a further connection.
/// A call occupies its connection until the response arrives, and some calls wait for a disk.
pub(crate) const CONNECTIONS_MAX: usize = 16;
/// The pause before a probe of the owner dials again, because the owner's listen queue was full.
const DIAL_RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Maximum duration of a call that was deferred while the owner was silent.
const DEFERRED_TIMEOUT: Duration = Duration::from_secs(30);

/// This process as a client of one owner.
///
/// A client never changes its owner: after a failover the process connects as a new client under a
/// new name, or owns the store. The old client remains while it holds reservations (see
/// [`crate::failover_catalog`]). When the old client is dropped, its name is released. All space
/// that the former owner had granted under this name then returns to the store, including space of
/// reservations whose response never arrived.
#[derive(Debug)]
pub(crate) struct Client {
    directory: Arc<NodeDirectory>,
    presence: Presence,
    owner: LockHolder,
    /// The protocol version that this client and its owner speak.
    version: u32,
    pub(crate) epoch: OwnerEpoch,
    liveness: OwnerLiveness,
    pool: Mutex<Pool>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct Pool {
    idle: Vec<Channel>,
    open: usize,
}

/// Maximum time to send a report.
const REPORT_TIMEOUT: Duration = Duration::from_millis(200);

impl Client {
    /// Connects to the owner of `directory`.
    ///
    /// # Errors
    /// [`OwnerLost`](crate::owner_lost::OwnerLost) if there is no owner, or it died;
    /// [`OwnerSilent`] if it does not answer; [`StoreReopening`](ritornello_store::StoreReopening)
    /// if it reopens the store; `Invalid` if the owner's process runs as another user; `Retry` if
    /// the owner has too many clients or another format, or if this process can create no socket or
    /// cannot lock its name; `Retry` if the owner has no protocol version in common with this
    /// build. For one second after such a version mismatch, calls fail without another handshake.
    pub(crate) fn connect(directory: &Arc<NodeDirectory>, until: Instant) -> Result<Arc<Self>> {
        // Read the holder before connecting: if the owner changes afterwards, the first liveness
        // check notices the change.
        let owner =
            directory.lock.holder()?.ok_or_else(|| owner_lost(io::ErrorKind::NotFound.into()))?;
        directory.mismatch.check(owner)?;
        let until = until.min(Instant::now() + HANDSHAKE_TIMEOUT);
        let dialled = dial(directory, owner, until)?;
        let presence = Presence::announce(directory)?;
        let hello = Hello::new(presence.name(), true);
        let (channel, epoch, version) = greet(directory, dialled, hello, OLDEST, owner, until)
            .inspect_err(|error| directory.mismatch.note(owner, error))?;
        Ok(Arc::new(Self {
            directory: Arc::clone(directory),
            presence,
            owner,
            version,
            epoch,
            liveness: OwnerLiveness::default(),
            pool: Mutex::new(Pool { idle: vec![channel], open: 1 }),
            returned: Condvar::new(),
        }))
    }

    /// Sends a request, and waits for its response if it has one.
    ///
    /// # Errors
    /// `Invalid` for malformed keys, or too many of them, or if the owner's version does not know
    /// the request; the error that the owner returned;
    /// [`OwnerLost`](crate::owner_lost::OwnerLost) if the owner died; [`OwnerSilent`] if it does
    /// not respond; `Retry` if all connections are busy, this process can open no further
    /// connection, or the response did not arrive in time; `Fatal` for an invalid response.
    pub(crate) fn call(
        self: &Arc<Self>,
        request: &Request<'_>,
        until: Instant,
    ) -> Result<Response> {
        if let Some(Keys::Listed(keys)) = request.keys() {
            check_keys(keys)?;
        }
        // Do not send a request that the owner's version does not know: the owner would close the
        // connection.
        let asks_why = matches!(
            request,
            Request::Explain { .. } | Request::Decisions { .. } | Request::ExplainRequest { .. }
        );
        if asks_why && self.version < EXPLAINS_SINCE {
            return Err(Error::invalid(
                "the store's owner is of a version that explains no misses and lists no decisions: \
                 restart it with this version",
            )
            .with("pid", self.owner.0));
        }
        match self.exchange(request, until)? {
            Response::Failed(fault) => Err(fault.into()),
            response => Ok(response),
        }
    }

    /// Sends a report, a request without a response, over an idle connection. Returns `false` if
    /// the caller must send it later. Makes no connection: a handshake that times out would mark
    /// the owner silent. An owner that speaks only a version before [`REPORTS_SINCE`] would close
    /// the connection at the unknown request, so the report is dropped, and the result is `true`.
    pub(crate) fn report(&self, request: &Request<'_>) -> bool {
        if self.version < REPORTS_SINCE {
            return true;
        }
        if self.liveness.is_silent() {
            return false;
        }
        let Some(mut channel) = self.pool.lock().idle.pop() else { return false };
        let until = Instant::now() + REPORT_TIMEOUT;
        let staged = channel.stage(request);
        let sent = staged.and_then(|()| {
            channel
                .send(&mut |_| if Instant::now() < until { Ok(()) } else { Err(late(self.owner)) })
        });
        if sent.is_ok() {
            self.check_in(channel);
        } else {
            // A part of the message may have been sent, so no other message can follow it.
            drop(channel);
            self.close_one();
        }
        sent.is_ok()
    }

    fn exchange(self: &Arc<Self>, request: &Request<'_>, until: Instant) -> Result<Response> {
        let mut channel = self.check_out(until)?;
        if let Err(error) = channel.stage(request) {
            self.check_in(channel);
            return Err(error);
        }
        let asked = Instant::now();
        let mut check_wait = |_| self.check_wait(asked, until);
        let exchanged = channel.send(&mut check_wait).and_then(|()| {
            if !request.rule().has_response {
                return Ok(Response::Done);
            }
            let bytes = channel.receive(&mut check_wait)?;
            response(bytes.ok_or_else(|| owner_lost(io::ErrorKind::UnexpectedEof.into()))?)
        });
        if exchanged.is_ok() && !channel.has_more() {
            self.check_in(channel);
            return exchanged;
        }
        // Close the connection: otherwise the response that is still to come would be taken for the
        // response to the next request.
        let last = channel.take_last_message().map(response);
        drop(channel);
        self.close_one();
        match (exchanged, last) {
            // The response arrived just as the wait timed out, or while this process was stopped
            // (SIGSTOP).
            (Err(error), Some(Ok(response))) if error.kind() == ErrorKind::Retry => Ok(response),
            (Err(error), _) => Err(error),
            (Ok(_), _) => Err(unexpected()),
        }
    }

    /// Checks whether a call made at `asked` may wait longer, and starts a probe if the call has
    /// waited for [`PROBE_AFTER`].
    fn check_wait(self: &Arc<Self>, asked: Instant, until: Instant) -> Result<()> {
        self.check_responsive()?;
        let now = Instant::now();
        if now >= until {
            return Err(late(self.owner));
        }
        if now.duration_since(asked) >= PROBE_AFTER {
            self.start_probe();
        }
        Ok(())
    }

    /// Checks that the owner is alive and is not marked silent.
    ///
    /// # Errors
    /// [`OwnerLost`](crate::owner_lost::OwnerLost) if the owner died; [`OwnerSilent`] if it does
    /// not respond.
    pub(crate) fn check_responsive(&self) -> Result<()> {
        if self.directory.lock.holder()? != Some(self.owner) {
            return Err(owner_lost(io::ErrorKind::ConnectionAborted.into()));
        }
        if self.liveness.is_silent() { Err(OwnerSilent::error(self.owner.0)) } else { Ok(()) }
    }

    /// Starts a probe thread if [`OwnerLiveness::begin_probe`] permits it; see [`crate::liveness`].
    fn start_probe(self: &Arc<Self>) {
        if !self.liveness.begin_probe() {
            return;
        }
        let probe = OwnerProbe {
            client: Arc::downgrade(self),
            directory: Arc::clone(&self.directory),
            hello: self.joining_hello(),
            owner: self.owner,
            until: Instant::now() + HANDSHAKE_TIMEOUT,
        };
        let thread = std::thread::Builder::new().name("ritornello-probe".to_owned());
        if let Err(error) = thread.spawn(move || probe.run()) {
            tracing::warn!(%error, "cannot start a thread to probe the store's owner");
            self.liveness.end_probe(false);
        }
    }

    fn mark_silent(&self) {
        if self.liveness.mark_silent() {
            let error = OwnerSilent::error(self.owner.0);
            tracing::warn!(dir = %self.directory.path().display(), "{error}");
        }
    }

    /// Makes `call` when the silent owner responds again, or now if its silence has ended. If the
    /// limit of deferred calls is reached, drops `call` unless it aborts a reservation.
    pub(crate) fn call_later(self: &Arc<Self>, call: LaterCall) {
        if self.liveness.defer(call) {
            self.send_deferred();
        }
    }

    /// Makes the calls that were deferred while the owner was silent. A call that fails is logged
    /// and dropped, unless the owner is silent again: then it is deferred again.
    fn send_deferred(self: &Arc<Self>) {
        for call in self.liveness.take_deferred() {
            if let Err(error) = self.call(&call.request(), Instant::now() + DEFERRED_TIMEOUT) {
                if OwnerSilent::caused(&error) {
                    self.call_later(call);
                }
                tracing::debug!(%error, ?call, "a deferred call failed");
            }
        }
    }

    /// Returns an idle connection, a new connection, or the next connection that is returned to the
    /// pool.
    fn check_out(self: &Arc<Self>, until: Instant) -> Result<Channel> {
        let mut pool = self.pool.lock();
        loop {
            if self.liveness.is_silent() {
                drop(pool);
                if let Err(error) = self.check_responsive() {
                    // This call may have consumed the notification about a connection that it does
                    // not use, so notify the next waiting call.
                    self.returned.notify_one();
                    return Err(error);
                }
                pool = self.pool.lock();
            }
            // Take the connection that was used last: the CPU caches on the owner's side probably
            // still hold its state.
            if let Some(channel) = pool.idle.pop() {
                return Ok(channel);
            }
            if pool.open < CONNECTIONS_MAX {
                pool.open += 1;
                drop(pool);
                return self.join(until).inspect_err(|_| self.close_one());
            }
            if self.returned.wait_until(&mut pool, until).timed_out() {
                return Err(Error::retry(
                    "all connections to the store's owner are busy: try again later",
                )
                .with("connections", CONNECTIONS_MAX));
            }
        }
    }

    fn joining_hello(&self) -> First<Hello> {
        First { version: self.version, body: Hello::new(self.presence.name(), false) }
    }

    /// Opens one more connection under this client's name.
    fn join(self: &Arc<Self>, until: Instant) -> Result<Channel> {
        let is_owner = self.directory.lock.holder()? == Some(self.owner);
        if !is_owner || self.directory.mismatch.check(self.owner).is_err() {
            return Err(replaced());
        }
        let hello = self.joining_hello();
        let until = until.min(Instant::now() + HANDSHAKE_TIMEOUT);
        let may_wait = &mut || Instant::now() < until;
        let joined = dial(&self.directory, self.owner, until)
            .and_then(|dialled| handshake(&self.directory, dialled, &hello, self.owner, may_wait));
        if joined.as_ref().is_err_and(OwnerSilent::caused) {
            self.mark_silent();
            self.start_probe();
        }
        match joined {
            Ok((channel, _)) => Ok(channel),
            // The owner to which this client connected speaks `self.version`, so another process
            // owns the store now.
            Err(error) if OtherVersion::of(&error).is_some() => Err(replaced()),
            Err(error) => Err(error),
        }
    }

    fn check_in(&self, channel: Channel) {
        self.pool.lock().idle.push(channel);
        self.returned.notify_one();
    }

    fn close_one(&self) {
        self.pool.lock().open -= 1;
        self.returned.notify_one();
    }
}

/// A handshake that finds out whether the owner still answers; see [`crate::liveness`].
struct OwnerProbe {
    /// The reference is weak, so that a probe does not keep the client alive, whose drop releases
    /// its name.
    client: Weak<Client>,
    directory: Arc<NodeDirectory>,
    hello: First<Hello>,
    owner: LockHolder,
    /// The owner is marked silent if it has not answered at this time.
    until: Instant,
}

impl OwnerProbe {
    fn run(&self) {
        let answered = loop {
            let dialled = dial(&self.directory, self.owner, Instant::now() + HANDSHAKE_TIMEOUT);
            let is_connected = dialled.is_ok();
            let greeted = dialled.and_then(|dialled| {
                handshake(&self.directory, dialled, &self.hello, self.owner, &mut || self.wait())
            });
            match greeted {
                // The owner's listen queue is full, and the client still exists: try again.
                Err(error) if OwnerSilent::caused(&error) && self.wait() => {
                    std::thread::sleep(DIAL_RETRY_PAUSE)
                }
                // A refusal is an answer; an error of this process's own socket is none.
                Err(error) => {
                    break is_connected && !OwnerSilent::caused(&error) && !is_owner_lost(&error);
                }
                Ok(_) => break true,
            }
        };
        let Some(client) = self.client.upgrade() else { return };
        if client.liveness.end_probe(answered) && answered {
            tracing::warn!(dir = %self.directory.path().display(), "the store's owner answers again");
            client.send_deferred();
        }
    }

    /// Returns whether the client still exists; marks the owner silent after the deadline.
    fn wait(&self) -> bool {
        let Some(client) = self.client.upgrade() else { return false };
        if Instant::now() >= self.until {
            client.mark_silent();
        }
        true
    }
}

/// Returns the error for a client whose owner no longer owns the store.
fn replaced() -> Error {
    owner_lost(io::ErrorKind::ConnectionReset.into())
}

/// Returns the error for a response that did not arrive in time.
pub(crate) fn late(owner: LockHolder) -> Error {
    Error::retry(
        "the store's owner did not answer in time, because its disk may be slow: try again later; \
         `ritornello doctor DIR` examines the disk",
    )
    .with("pid", owner.0)
}

pub(crate) fn response(bytes: &[u8]) -> Result<Response> {
    decode(bytes).map_err(|error| unexpected().because(error))
}

pub(crate) fn unexpected() -> Error {
    Error::fatal("the store's owner sent an invalid response: report this")
}

//! A client of one owner: a name, and a small pool of connections.

use crate::channel::{Channel, decode_owned};
use crate::home::Home;
use crate::lost::lost;
use crate::presence::Presence;
use crate::protocol::{Entry, Greeting, Hello, Request, Response, Welcome};
use crate::record_lock::Holder;
use crate::socket::{self, SocketFile};
use crate::term::Term;
use parking_lot::{Condvar, Mutex};
use ritornello_format::{Error, Result};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Connections of one process to its owner at most: calls that wait for a disk, mostly.
const CONNECTIONS_MAX: usize = 16;
/// An owner that lives answers a hello within this.
const HANDSHAKE: Duration = Duration::from_secs(2);
/// How often a waiting call looks whether its owner lives. A closed connection wakes it at once;
/// this is for those that a forked child of the dead owner keeps open.
const LOOK: Duration = Duration::from_millis(100);

/// This process, as one owner knows it.
///
/// A client stands and falls with its owner: after a loss the process comes back as a new client,
/// under a new name. The old one lives on while it holds reservations (see [`crate::ledger`]), and
/// when it is dropped its name is free: whatever the former owner had handed out under it, heard
/// of or not, goes back to the store.
#[derive(Debug)]
pub(crate) struct Client {
    home: Arc<Home>,
    presence: Presence,
    owner: Holder,
    term: Term,
    pool: Mutex<Pool>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct Pool {
    idle: Vec<Channel>,
    open: usize,
}

impl Client {
    /// Connects to the owner of `home`, if there is one that listens.
    ///
    /// # Errors
    /// Lost if there is none, or it went away; `Invalid` if it is another user's or version's.
    pub(crate) fn connect(home: &Arc<Home>, until: Instant) -> Result<Self> {
        // Before connecting: were the owner to change meanwhile, the first look would tell.
        let owner = home.lock.holder()?.ok_or_else(|| lost(io::ErrorKind::NotFound.into()))?;
        let dialled = dial(home, until)?;
        let presence = Presence::announce(home)?;
        let hello = Hello::new(presence.name(), true);
        let (channel, term) = enter(home, dialled, &hello, owner, until)?;
        Ok(Self {
            home: Arc::clone(home),
            presence,
            owner,
            term,
            pool: Mutex::new(Pool { idle: vec![channel], open: 1 }),
            returned: Condvar::new(),
        })
    }

    /// The owner's.
    pub(crate) fn term(&self) -> &Term {
        &self.term
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// What the owner answered; lost if it went away; `Retry` if it did not answer in time.
    pub(crate) fn call(&self, request: &Request<'_>, until: Instant) -> Result<Response> {
        let mut channel = self.check_out(until)?;
        if let Err(error) = channel.stage(request) {
            self.check_in(channel);
            return Err(error);
        }
        match self.exchange(&mut channel, until) {
            Ok(response) => {
                self.check_in(channel);
                match response {
                    Response::Failed(fault) => Err(fault.into()),
                    response => Ok(response),
                }
            }
            Err(error) => {
                // What comes over this connection next would answer the wrong question.
                drop(channel);
                self.forget_one();
                Err(error)
            }
        }
    }

    fn exchange(&self, channel: &mut Channel, until: Instant) -> Result<Response> {
        let mut patience = |_| self.look(until);
        channel.send(&mut patience)?;
        match channel.receive(&mut patience)? {
            None => Err(lost(io::ErrorKind::UnexpectedEof.into())),
            Some(bytes) => decode_owned(bytes).map_err(|error| {
                Error::fatal("the store's owner said what no owner says: report this")
                    .because(error)
            }),
        }
    }

    /// Whether to wait any longer.
    fn look(&self, until: Instant) -> Result<()> {
        if self.home.lock.holder()? != Some(self.owner) {
            return Err(lost(io::ErrorKind::ConnectionAborted.into()));
        }
        if Instant::now() < until {
            return Ok(());
        }
        Err(Error::retry("the store's owner did not answer in time").with("pid", self.owner.0))
    }

    /// An idle connection, or a new one, or the next that is returned.
    fn check_out(&self, until: Instant) -> Result<Channel> {
        let mut pool = self.pool.lock();
        loop {
            // The last one used is the warmest.
            if let Some(channel) = pool.idle.pop() {
                return Ok(channel);
            }
            if pool.open < CONNECTIONS_MAX {
                pool.open += 1;
                drop(pool);
                return self.join(until).inspect_err(|_| self.forget_one());
            }
            if self.returned.wait_until(&mut pool, until).timed_out() {
                return Err(Error::retry("all connections to the store's owner are busy")
                    .with("connections", CONNECTIONS_MAX));
            }
        }
    }

    /// One more connection under the same name.
    fn join(&self, until: Instant) -> Result<Channel> {
        let hello = Hello::new(self.presence.name(), false);
        let dialled = dial(&self.home, until)?;
        enter(&self.home, dialled, &hello, self.owner, until).map(|(channel, _)| channel)
    }

    fn check_in(&self, channel: Channel) {
        self.pool.lock().idle.push(channel);
        self.returned.notify_one();
    }

    fn forget_one(&self) {
        self.pool.lock().open -= 1;
        self.returned.notify_one();
    }
}

/// A connection to whoever listens, and the socket file that led there.
fn dial(home: &Home, until: Instant) -> Result<(Channel, Option<SocketFile>)> {
    let file = socket::present(home);
    let patience = until.saturating_duration_since(Instant::now()).min(HANDSHAKE);
    let stream = socket::dial(home, patience)?;
    Ok((Channel::new(Arc::new(stream), LOOK)?, file))
}

/// Says hello. Returns the connection and the term of the owner behind it.
fn enter(
    home: &Home,
    (mut channel, file): (Channel, Option<SocketFile>),
    hello: &Hello,
    owner: Holder,
    until: Instant,
) -> Result<(Channel, Term)> {
    let until = until.min(Instant::now() + HANDSHAKE);
    let mut patience = |_| {
        // A socket that a forked child of a dead owner keeps open takes connections and never
        // answers; the next owner puts its own in that place.
        let same = home.lock.holder()? == Some(owner) && socket::present(home) == file;
        if same && Instant::now() < until {
            return Ok(());
        }
        Err(lost(io::ErrorKind::TimedOut.into()))
    };
    channel.stage(hello)?;
    channel.send(&mut patience)?;
    let answer = channel.receive(&mut patience)?;
    let answer = answer.ok_or_else(|| lost(io::ErrorKind::UnexpectedEof.into()))?;
    Greeting::check(answer, "the process that owns this store")?;
    let welcome: Welcome = decode_owned(answer)?;
    match welcome.outcome {
        Entry::Granted(term) => Ok((channel, term)),
        Entry::Gone => Err(lost(io::ErrorKind::ConnectionReset.into())),
        Entry::Refused(fault) => Err(fault.into()),
    }
}

//! Connecting to an owner, and the handshake with it.

use crate::channel::Channel;
use crate::greeting::{First, NEWEST, OWNER, OtherVersion};
use crate::node_directory::NodeDirectory;
use crate::owner_lost::owner_lost;
use crate::protocol::{Hello, HelloReply, OwnerEpoch};
use crate::record_lock::LockHolder;
use crate::socket::{self, SocketFile};
use ritornello_format::Result;
use ritornello_store::OwnerSilent;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum time to wait for a handshake. After this time, the owner is treated as silent.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval at which a waiting call checks the owner's lock. A closed connection wakes the call
/// immediately. The check finds dead owners whose connections a forked child keeps open.
const LIVENESS_INTERVAL: Duration = Duration::from_millis(100);

/// A connection, and the socket file that led to it.
pub(crate) type Dialled = (Channel, Option<SocketFile>);

/// Says `hello` in the newest version that this build and the owner have in common. Returns the
/// connection, the owner's epoch and the version. `hello` is not said in versions before `oldest`.
///
/// # Errors
/// Errors of [`dial`] and [`handshake`]; [`OtherVersion`] if the newest version in common is older
/// than `oldest`, or if there is none.
pub(crate) fn greet(
    directory: &NodeDirectory,
    dialled: Dialled,
    hello: Hello,
    oldest: u32,
    owner: LockHolder,
    until: Instant,
) -> Result<(Channel, OwnerEpoch, u32)> {
    let may_wait = &mut || Instant::now() < until;
    let mut hello = First { version: NEWEST, body: hello };
    let mut joined = handshake(directory, dialled, &hello, owner, may_wait);
    // If the owner speaks only older versions, its reply names them: say hello again in the newest
    // common version.
    let common = joined.as_ref().err().and_then(OtherVersion::of);
    if let Some(older) = common.and_then(OtherVersion::in_common)
        && (oldest..hello.version).contains(&older)
    {
        hello.version = older;
        joined = handshake(directory, dial(directory, owner, until)?, &hello, owner, may_wait);
    }
    let (channel, epoch) = joined?;
    Ok((channel, epoch, hello.version))
}

/// Connects to the listening owner. Returns the connection and the socket file that led to it.
///
/// # Errors
/// [`OwnerLost`](crate::owner_lost::OwnerLost) if no process listens; [`OwnerSilent`] if the listen
/// queue of `owner` stays full; `Retry` if this process can create no socket; `Invalid` if another
/// user listens.
pub(crate) fn dial(
    directory: &NodeDirectory,
    owner: LockHolder,
    until: Instant,
) -> Result<Dialled> {
    let file = socket::present(directory);
    let patience = until.saturating_duration_since(Instant::now()).min(HANDSHAKE_TIMEOUT);
    let stream = socket::dial(directory, patience)?.ok_or_else(|| OwnerSilent::error(owner.0))?;
    Ok((Channel::new(Arc::new(stream), LIVENESS_INTERVAL)?, file))
}

/// Sends `hello` and waits for the reply while `may_wait` returns true. Returns the connection and
/// the owner's epoch.
///
/// # Errors
/// [`OwnerLost`](crate::owner_lost::OwnerLost) if the owner died, its socket file was replaced, or
/// it replied [`HelloReply::Gone`]; [`OwnerSilent`] if it did not reply; the error in the owner's
/// reply; any error of [`First::read`] for this reply.
pub(crate) fn handshake(
    directory: &NodeDirectory,
    (mut channel, file): Dialled,
    hello: &First<Hello>,
    owner: LockHolder,
    may_wait: &mut dyn FnMut() -> bool,
) -> Result<(Channel, OwnerEpoch)> {
    let mut patience = |_| {
        // A forked child of a dead owner keeps the owner's socket open. The socket then accepts
        // connections and never answers, until the next owner replaces the socket file.
        if directory.lock.holder()? != Some(owner) || socket::present(directory) != file {
            return Err(owner_lost(io::ErrorKind::TimedOut.into()));
        }
        if may_wait() { Ok(()) } else { Err(OwnerSilent::error(owner.0)) }
    };
    channel.stage(hello)?;
    channel.send(&mut patience)?;
    let answer = channel.receive(&mut patience)?;
    let answer = answer.ok_or_else(|| owner_lost(io::ErrorKind::UnexpectedEof.into()))?;
    match First::read(answer, hello.version..=hello.version, OWNER)?.body {
        HelloReply::Granted(epoch) => Ok((channel, epoch)),
        HelloReply::Gone => Err(owner_lost(io::ErrorKind::ConnectionReset.into())),
        HelloReply::Refused(fault) => Err(fault.refusal()),
    }
}

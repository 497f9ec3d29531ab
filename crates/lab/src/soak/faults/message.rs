//! Messages between `soak --faults` and its clients: one JSON object per line, over the client's
//! standard input and output.

use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};

/// A message from the command to a client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Continue the work of an earlier process of this client. The earlier process reported the
    /// sequences in `live` as flushed; they are in the store of the soak. Delete the sequences that
    /// the earlier process may have put after its last report: the `UNREPORTED_MAX` (`client.rs`)
    /// numbers before this process's first number, without those in `live`.
    Adopt {
        /// Identity of the store. Sequences put into another store are not checked.
        store: String,
        /// Numbers of the flushed sequences.
        live: Vec<u64>,
    },
    /// Let operations of the file system fail with this error.
    Break(InjectedError),
    /// Let operations succeed again.
    Heal,
    /// Register this number of new scopes, and put one page in each.
    RegisterScopes(u64),
    /// Read these sequences of a client, and report the missing sequences.
    Check {
        /// Number of the client that put the sequences.
        client: u64,
        /// Numbers of the sequences.
        sequences: Vec<u64>,
    },
}

/// Errors injected into a client's calls of the file system, except transfers of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum InjectedError {
    /// `EIO` from `fdatasync(2)` and `fsync(2)`.
    Sync,
    /// `ENOSPC` from calls that take space.
    Space,
    /// `EMFILE` from `open(2)`.
    Files,
}

/// A message from a client to the command.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// State of the client, ten times per second.
    State(State),
    /// A flush succeeded: after this message, these sequences must be found.
    Flushed(Vec<u64>),
    /// The client is about to delete these sequences: they may be missing after this message.
    Deleting(Vec<u64>),
    /// The answer to [`Order::Check`].
    Checked {
        /// Sequences that were not found in full.
        lost: Vec<u64>,
        /// Why the last sequence of `lost` was not found; empty if all were found.
        why: String,
    },
}

/// State of a client.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct State {
    /// Successful rounds of put and get.
    pub rounds: u64,
    /// Number of the next sequence to put.
    pub next: u64,
    /// Start of the last successful round, in milliseconds of the system's clock since boot.
    pub began: u64,
    /// Bytes put and read.
    pub bytes: u64,
    /// Bytes read that differ from the bytes put.
    pub wrong_bytes: u64,
    /// Milliseconds of the slowest call.
    pub slowest: u64,
    /// Milliseconds of the current call so far.
    pub present: u64,
    /// "owner", "client", or "" while the store is not open.
    pub role: String,
    /// Whether the last successful round was on the store of the soak, and not on a store that the
    /// clients created while the store of the soak was moved away.
    pub is_soak_store: bool,
    /// The last error; "" after a round that succeeded.
    pub trouble: String,
}

/// Writes one message on a line. Ignores a closed pipe: the command polls whether its clients run,
/// and a client ends when its standard input ends.
pub fn send(to: &mut impl Write, message: &impl Serialize) {
    if let Ok(mut line) = serde_json::to_string(message) {
        line.push('\n');
        let _ = to.write_all(line.as_bytes()).and_then(|()| to.flush());
    }
}

/// Reads messages until the other process ends. Skips lines that are not messages.
pub fn receive<T: for<'a> Deserialize<'a>>(from: impl BufRead) -> impl Iterator<Item = T> {
    from.lines().map_while(Result::ok).filter_map(|line| serde_json::from_str(&line).ok())
}

/// Returns the milliseconds since boot, which are the same in all processes.
pub fn clock() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

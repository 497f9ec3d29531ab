//! What the command and its clients say to each other: one JSON object a line, over the client's
//! standard input and output.

use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};

/// From the command to a client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Go on where a client before ended: the sequences `live` are in the store of the soak, and of the
    /// others before the first one of this client some may be. They go.
    Adopt {
        /// The store's identity. What is put into another one is not looked for.
        store: String,
        /// Numbers of sequences.
        live: Vec<u64>,
    },
    /// Operations of the file system fail from now on, as the trouble says.
    Break(Trouble),
    /// They succeed again.
    Heal,
    /// Register this many new scopes, and put one page in each.
    Salts(u64),
    /// Read these sequences of a client, and report on them.
    Check {
        /// Whose sequences.
        client: u64,
        /// Their numbers.
        sequences: Vec<u64>,
    },
}

/// Faults injected into a client's file system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Trouble {
    /// `EIO` from `fdatasync(2)` and `fsync(2)`.
    Sync,
    /// `ENOSPC` from what takes space.
    Space,
    /// `EMFILE` from `open(2)`.
    Files,
}

/// From a client to the command.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// How it is, ten times a second.
    State(State),
    /// A flush succeeded: these sequences must be found from now on.
    Flushed(Vec<u64>),
    /// It is about to delete these: they need not be found any more.
    Deleting(Vec<u64>),
    /// The answer to [`Order::Check`].
    Checked {
        /// Sequences that were not found whole.
        lost: Vec<u64>,
        /// Why, as far as the store says.
        why: String,
    },
}

/// How a client is.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct State {
    /// Rounds of put and get that succeeded.
    pub rounds: u64,
    /// The number of the next sequence.
    pub next: u64,
    /// When the last of them began, in milliseconds of the system's clock since boot.
    pub began: u64,
    /// Bytes put and got.
    pub bytes: u64,
    /// Bytes read that differ from the bytes put.
    pub wrong_bytes: u64,
    /// Milliseconds that the slowest call took.
    pub slowest: u64,
    /// Milliseconds that the present call has taken.
    pub present: u64,
    /// "owner", "client", or "" while the store is not open.
    pub role: String,
    /// Whether the last round was on the store of the soak, and not on one that was made while that was
    /// away.
    pub is_home: bool,
    /// The last error; "" after a round that succeeded.
    pub trouble: String,
}

/// Writes one line. A reader that went away ends the process soon enough.
pub fn tell(to: &mut impl Write, message: &impl Serialize) {
    if let Ok(mut line) = serde_json::to_string(message) {
        line.push('\n');
        let _ = to.write_all(line.as_bytes()).and_then(|()| to.flush());
    }
}

/// Reads messages until the other process ends. Skips lines that are not messages.
pub fn hear<T: for<'a> Deserialize<'a>>(from: impl BufRead) -> impl Iterator<Item = T> {
    from.lines().map_while(Result::ok).filter_map(|line| serde_json::from_str(&line).ok())
}

/// Milliseconds since boot, the same for all processes.
pub fn clock() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

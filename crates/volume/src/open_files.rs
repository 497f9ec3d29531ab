//! The limit of open files of this process (`RLIMIT_NOFILE`), raised to the number that a store
//! needs.

use parking_lot::Mutex;
use ritornello_format::{Error, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Number of files reserved for what a store opens besides its segments: the index, connections,
/// and the eventfds of tickets.
pub const OTHER_FILES: u64 = 1024;

/// Raises the soft limit so that `segments` files and [`OTHER_FILES`] can be opened in addition to
/// the files open now. Never lowers the limit.
///
/// # Errors
/// `Invalid`, with the required number, if the hard limit is lower than this number (the soft limit
/// is then raised to the hard limit), or if the limit cannot be changed.
pub(crate) fn reserve(segments: u64) -> Result<()> {
    /// Serialises read and write of the limit: a concurrent raise could otherwise be overwritten by
    /// a lower value.
    static RAISE: Mutex<()> = Mutex::new(());
    let _raise = RAISE.lock();
    let limit = getrlimit(Resource::Nofile);
    let needed = open_now().saturating_add(segments).saturating_add(OTHER_FILES);
    let Some(soft) = limit.current.filter(|soft| *soft < needed) else { return Ok(()) };
    let raised_limit = limit.maximum.map_or(needed, |hard| needed.min(hard));
    if raised_limit > soft {
        let raised = Rlimit { current: Some(raised_limit), ..limit };
        setrlimit(Resource::Nofile, raised).map_err(|error| {
            Error::invalid(shortage(needed, soft)).because(std::io::Error::from(error))
        })?;
        tracing::debug!(from = soft, to = raised_limit, "the limit of open files is raised");
    }
    if raised_limit < needed { Err(Error::invalid(shortage(needed, raised_limit))) } else { Ok(()) }
}

fn shortage(needed: u64, limit: u64) -> String {
    format!(
        "this process may open {limit} files, and may need {needed} with this store: pages in \
         segments beyond the limit miss; raise the hard limit to {needed} (`ulimit -Hn`, \
         LimitNOFILE= of a systemd unit, --ulimit nofile= of a container)"
    )
}

/// Number of files that this process has open; zero where `/proc` is not mounted.
fn open_now() -> u64 {
    std::fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count() as u64)
}

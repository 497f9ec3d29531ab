//! The stores that this process has open: one a directory, however often it is opened.
//!
//! Not for convenience: a second `LOCK` descriptor in one process would free the lock when closed,
//! and to a process its own lock looks free, so a second engine would be let in.

use crate::node_directory::Identity;
use crate::process::Process;
use crate::shared::Shared;
use parking_lot::Mutex;
use ritornello_format::{Error, Result};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// What is open on one directory. Locked while it is being opened or closed, which may take long.
pub(crate) type Slot = Arc<Mutex<Weak<Shared>>>;

/// By directory, with the process that made the entry: a forked child starts afresh.
static OPEN: Mutex<BTreeMap<Identity, (Process, Slot)>> = Mutex::new(BTreeMap::new());

/// Held for a lookup only. In a forked child it may be held for ever, by a thread that is not there.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// The slot of a directory in this process.
///
/// # Errors
/// `Retry` if this process was forked just when its parent opened a store.
pub(crate) fn slot(directory: Identity) -> Result<Slot> {
    let Some(mut open) = OPEN.try_lock_for(CALL_TIMEOUT) else {
        return Err(Error::retry(
            "this process was forked while its parent was opening a store: fork again",
        ));
    };
    // Those nobody holds or waits for.
    open.retain(|_, (process, slot)| {
        let vacant = || slot.try_lock().is_some_and(|shared| shared.strong_count() == 0);
        process.is_current() && (Arc::strong_count(slot) > 1 || !vacant())
    });
    let (_, slot) = open.entry(directory).or_insert_with(|| (Process::current(), Slot::default()));
    Ok(Arc::clone(slot))
}

//! The stores that this process has open: one entry per directory, however often it is opened.
//!
//! A process sees its own lock as free, so with two entries for one directory it could open a
//! second core. It would also release the lock as soon as it closed one of its two `LOCK`
//! descriptors.

use crate::node_directory::Identity;
use crate::process::Process;
use crate::shared::Shared;
use parking_lot::Mutex;
use ritornello_format::{Error, Result};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// The open store of one directory. Locked while a thread opens or closes the store, or works on
/// its directory without opening the store ([`crate::exclusive`]); each may take long.
pub(crate) type Slot = Arc<Mutex<Weak<Shared>>>;

/// Open stores by directory, each with the process that made the entry: a forked child removes its
/// parent's entries.
static OPEN: Mutex<BTreeMap<Identity, (Process, Slot)>> = Mutex::new(BTreeMap::new());

/// Timeout of the lock on [`OPEN`]. A thread holds the lock for a lookup only, but if a thread of
/// the parent holds it during a fork, it stays locked in the child forever.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the slot of a directory in this process.
///
/// # Errors
/// `Retry` if this process was forked while a thread of its parent was in this function.
pub(crate) fn slot(directory: Identity) -> Result<Slot> {
    let Some(mut open) = OPEN.try_lock_for(CALL_TIMEOUT) else {
        return Err(Error::retry(
            "this process was forked while its parent was accessing a store: fork again",
        ));
    };
    // Remove the entries of a parent process, and the entries of dropped stores that no thread
    // holds or waits for.
    open.retain(|_, (process, slot)| {
        let vacant = || slot.try_lock().is_some_and(|shared| shared.strong_count() == 0);
        process.is_current() && (Arc::strong_count(slot) > 1 || !vacant())
    });
    let (_, slot) = open.entry(directory).or_insert_with(|| (Process::current(), Slot::default()));
    Ok(Arc::clone(slot))
}

//! The arguments with which a process opened its store.

use crate::heal_signal::HealSignal;
use crate::node_directory::NodeDirectory;
use crate::permissions::ClientPermissions;
use ritornello_medium::Medium;
use ritornello_store::Options;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Arguments of [`open`](crate::open). The process uses them again when it becomes the owner in a
/// takeover, and when it reopens a failed store, but then without the capacity, the directories and
/// the index, because the store may have changed since.
pub(crate) struct OpenContext {
    pub(crate) directory: Arc<NodeDirectory>,
    pub(crate) medium: Arc<dyn Medium>,
    pub(crate) options: Options,
    /// The calls that clients may make while this process is the owner.
    pub(crate) permissions: Arc<ClientPermissions>,
    /// Whether the store is being closed; [`Membership::join`](crate::membership::Membership::join)
    /// then stops retrying.
    pub(crate) closing: AtomicBool,
    /// Wakes the thread that reopens a poisoned store ([`crate::heal`]).
    pub(crate) heal_signal: Arc<HealSignal>,
}

//! Messages to systemd, if it started the command with a notification socket.

use sd_notify::NotifyState;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Tells systemd when the command is ready: when each store has an owner, this process or another,
/// or failed and is tried again.
pub(super) struct Readiness {
    unopened: AtomicUsize,
}

impl Readiness {
    /// The command is ready after `stores` calls of [`Readiness::opened`].
    pub(super) fn new(stores: usize) -> Self {
        if stores == 0 {
            send(NotifyState::Ready);
        }
        Self { unopened: AtomicUsize::new(stores) }
    }

    /// Notes that a store has an owner, or failed and is tried again.
    pub(super) fn opened(&self) {
        if self.unopened.fetch_sub(1, Ordering::AcqRel) == 1 {
            send(NotifyState::Ready);
        }
    }

    /// Tells systemd that the command ends.
    pub(super) fn ending(&self) {
        send(NotifyState::Stopping);
    }
}

fn send(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "systemd cannot be told the state of the command");
    }
}

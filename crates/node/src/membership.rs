//! What a process is to a store at the moment, and how it comes to be that.

use crate::client::Client;
use crate::heal::HealSignal;
use crate::node_directory::NodeDirectory;
use crate::owner::Owner;
use crate::owner_epoch::OwnerEpoch;
use crate::owner_lost::is_owner_lost;
use crate::permissions::ClientPermissions;
use crate::reopening::Reopening;
use ritornello_format::{Error, ErrorKind, Result};
use ritornello_medium::Medium;
use ritornello_store::{Options, OwnerSilent, StoreReopening};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A free lock rings no heal_signal, and neither does an owner that is still recovering: whoever waits
/// for one looks again after these pauses, first and longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// A process's part.
pub(crate) enum Membership {
    /// It owns the store.
    Owner(Owner),
    /// Another process does.
    Client(Arc<Client>),
    /// It owns the store, whose engine failed, and opens it again.
    Reopening(Reopening),
    /// It has none any more.
    Closed,
}

/// Everything it takes to open a store, the first time or again.
pub(crate) struct OpenContext {
    pub(crate) directory: Arc<NodeDirectory>,
    pub(crate) medium: Arc<dyn Medium>,
    pub(crate) options: Options,
    /// What clients may do while this process is the owner.
    pub(crate) permissions: Arc<ClientPermissions>,
    /// Ends the search for a membership.
    pub(crate) closing: AtomicBool,
    /// Rung when an engine is poisoned.
    pub(crate) heal_signal: Arc<HealSignal>,
}

impl OpenContext {
    /// Takes the lock and owns the store, or connects to whoever has it. If both fail because an
    /// owner comes or goes, tries again until it is too late; because it reopens the store, for
    /// `reopening` at most. Where `known`, this process has used the store already.
    ///
    /// # Errors
    /// Those of [`ritornello_store::StoreCore::open`] where the lock was free; `Invalid` for an owner
    /// of another user; `Retry` if there is an owner that does not listen, that speaks no version of
    /// this build, or that reopens the store.
    pub(crate) fn join(
        &self,
        until: Instant,
        reopening: Duration,
        known: bool,
    ) -> Result<Membership> {
        let mut pause = PAUSES.0;
        let reopened = until.min(Instant::now() + reopening);
        loop {
            if self.directory.try_own()? {
                let owner = Owner::open(self);
                if owner.is_err() {
                    self.directory.lock.release();
                }
                return owner.map(Membership::Owner).map_err(|error| match error.kind() {
                    // The disk failed before the owner died: as if that one reopened the store.
                    ErrorKind::Fatal | ErrorKind::Retry if known => {
                        tracing::debug!(%error, "the store cannot be taken over yet");
                        StoreReopening::error(&error.to_string())
                    }
                    _ => error,
                });
            }
            let error = match Client::connect(&self.directory, until) {
                Ok(client) => return Ok(Membership::Client(client)),
                Err(error) if is_owner_lost(&error) || OwnerSilent::caused(&error) => error,
                Err(error)
                    if StoreReopening::caused(&error) && Instant::now() + pause <= reopened =>
                {
                    error
                }
                Err(error) => return Err(error),
            };
            if self.closing.load(Ordering::Acquire) {
                return Err(closed());
            }
            if Instant::now() + pause > until {
                let owner =
                    self.directory.lock.holder().ok().flatten().map_or(0, |holder| holder.0);
                tracing::debug!(%error, "nobody listens");
                return Err(OwnerSilent::error(owner).with("dir", self.directory.path().display()));
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(PAUSES.1);
        }
    }
}

/// What calls are told once the store is closed.
pub(crate) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the store is closed: open it again")
}

impl Membership {
    /// The owner's epoch.
    pub(crate) fn epoch(&self) -> Option<&OwnerEpoch> {
        match self {
            Self::Owner(owner) => Some(owner.epoch()),
            Self::Client(client) => Some(client.epoch()),
            Self::Reopening(_) | Self::Closed => None,
        }
    }

    /// Gives the part up, if it is one that others wait for; see [`Owner::close`].
    ///
    /// # Errors
    /// `Retry` if it cannot be given up yet.
    pub(crate) fn close(&self) -> Result<Result<()>> {
        match self {
            Self::Owner(owner) => owner.close(),
            Self::Reopening(reopening) => reopening.close(),
            Self::Client(_) | Self::Closed => Ok(Ok(())),
        }
    }
}

//! The role of this process: owner, client, reopening, leaving or closed.

use crate::client::Client;
use crate::lock::closed;
use crate::open_context::OpenContext;
use crate::owner::Owner;
use crate::owner_lost::is_owner_lost;
use crate::protocol::OwnerEpoch;
use crate::reopening::Reopening;
use ritornello_format::{ErrorKind, Result};
use ritornello_store::{CatalogStats, OwnerSilent, StoreCore, StoreReopening};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// First and longest pause between attempts to own the store or to connect to its owner: a waiting
/// process gets no notice when the lock is released or an owner has recovered.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// How this process takes part in the store.
pub(crate) enum Membership {
    /// This process owns the store.
    Owner(Arc<Owner>),
    /// Another process owns the store.
    Client(Arc<Client>),
    /// This process owns the store, whose core failed, and opens a new core.
    Reopening(Reopening),
    /// The store's path no longer leads to it: the former membership is being closed, and calls are
    /// refused.
    Leaving(Arc<Membership>),
    /// The store is closed in this process.
    Closed,
}

/// The role of this process. A client may become the owner after the owner died or closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// This process holds the store's lock and answers the other processes, also while it reopens
    /// the store.
    Owner,
    /// Another process is the owner, or this process has closed or is leaving the store.
    Client,
}

impl Role {
    /// The role in one lower-case word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Owner => "owner",
            Self::Client => "client",
        }
    }
}

impl Membership {
    /// Takes the lock and opens the store as its owner, or connects to the owner. Retries until
    /// `until` if the lock is taken and its holder starts, ends or does not answer. Retries for at
    /// most `reopening`, and not beyond `until`, if the owner reopens the store. `known` says that
    /// this process has used the store before, so some owner was able to open it: if this process
    /// takes the lock and fails to open the store with `Fatal` or `Retry`, the error is
    /// [`StoreReopening`].
    ///
    /// # Errors
    /// If the lock was free, any error of [`ritornello_store::StoreCore::open`], and `Retry` if the
    /// server cannot start. If another process owns the store, `Invalid` for an owner of another
    /// user; `Retry` for an owner that does not listen, refuses this client, has no common protocol
    /// version, or reopens the store. `Fatal` if the path leads to another directory; `Closed` if
    /// this process closes the store during the call.
    pub(crate) fn join(
        opening: &OpenContext,
        until: Instant,
        reopening: Duration,
        known: bool,
    ) -> Result<Self> {
        let directory = &opening.directory;
        let mut pause = PAUSES.0;
        let reopened = until.min(Instant::now() + reopening);
        loop {
            if directory.try_own()? {
                let owner = Owner::open(opening);
                if owner.is_err() {
                    directory.lock.release();
                }
                return owner.map(|owner| Self::Owner(Arc::new(owner))).map_err(
                    |error| match error.kind() {
                        // The disk probably failed before the previous owner died, so calls get the
                        // same answers as during a reopening.
                        ErrorKind::Fatal | ErrorKind::Retry if known => {
                            tracing::debug!(%error, "the store cannot be taken over yet");
                            StoreReopening::error(&error.to_string())
                        }
                        _ => error,
                    },
                );
            }
            let error = match Client::connect(directory, until) {
                Ok(client) => return Ok(Self::Client(client)),
                Err(error) if is_owner_lost(&error) || OwnerSilent::caused(&error) => error,
                Err(error)
                    if StoreReopening::caused(&error) && Instant::now() + pause <= reopened =>
                {
                    error
                }
                Err(error) => return Err(error),
            };
            if opening.closing.load(Ordering::Acquire) {
                return Err(closed());
            }
            if Instant::now() + pause > until {
                let owner = directory.lock.holder().ok().flatten().map_or(0, |holder| holder.0);
                tracing::debug!(%error, "no owner listens");
                return Err(OwnerSilent::error(owner).with("dir", directory.path().display()));
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(PAUSES.1);
        }
    }

    /// Returns the owner's epoch if the process is owner or client.
    pub(crate) fn epoch(&self) -> Option<&OwnerEpoch> {
        match self {
            Self::Owner(owner) => Some(&owner.epoch),
            Self::Client(client) => Some(&client.epoch),
            Self::Reopening(_) | Self::Leaving(_) | Self::Closed => None,
        }
    }

    pub(crate) fn role(&self) -> Role {
        match self {
            Self::Owner(_) | Self::Reopening(_) => Role::Owner,
            Self::Client(_) | Self::Leaving(_) | Self::Closed => Role::Client,
        }
    }

    /// Returns the store's core if this process owns the store; `None` while it reopens the store.
    pub(crate) fn core(&self) -> Option<&Arc<StoreCore>> {
        if let Self::Owner(owner) = self { Some(&owner.core) } else { None }
    }

    /// Returns the last statistics of the failed core while this process reopens the store, or
    /// leaves the store during a reopening.
    pub(crate) fn last_figures(&self) -> Option<CatalogStats> {
        match self {
            Self::Reopening(reopening) => Some(reopening.stats()),
            Self::Leaving(former) => former.last_figures(),
            Self::Owner(_) | Self::Client(_) | Self::Closed => None,
        }
    }

    /// Ends this process's ownership, if any, so that another process can become the owner. The
    /// inner result says whether all changes are durable; see [`Owner::close`].
    ///
    /// # Errors
    /// `Retry` if the ownership cannot end yet.
    pub(crate) fn close(&self) -> Result<Result<()>> {
        match self {
            Self::Owner(owner) => owner.close(),
            Self::Reopening(reopening) => reopening.close(),
            Self::Leaving(former) => former.close(),
            Self::Client(_) | Self::Closed => Ok(Ok(())),
        }
    }
}

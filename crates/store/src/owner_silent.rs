//! Errors of an owner that is alive but serves no page: it answers nothing, because it is stopped,
//! frozen or in a debugger, or it refuses calls while it reopens its store after a failed write or
//! sync.
//!
//! No other process can answer, so lookups miss and puts are skipped: an inference engine computes
//! the missing pages, and is not delayed. A flush, a deletion, and other calls whose success would
//! be a false report, fail.

use ritornello_format::Error;
use std::error::Error as StdError;
use std::fmt;

/// Returns the reason that a get or put reports if `error` says that the owner is silent or reopens
/// the store. Returns `None` for other errors, with which the get or put fails.
pub(crate) fn reason(error: &Error) -> Option<&'static str> {
    if OwnerSilent::caused(error) {
        Some("owner_silent")
    } else if StoreReopening::caused(error) {
        Some("reopening")
    } else {
        None
    }
}

/// The cause of an error: the owner is alive and does not respond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerSilent;

impl fmt::Display for OwnerSilent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the owner answers no handshake")
    }
}

impl StdError for OwnerSilent {}

impl OwnerSilent {
    /// Returns the error for a call to a silent owner. `pid` is the owner's process id, or zero if
    /// the owner is in another PID namespace.
    #[must_use]
    pub fn error(pid: i32) -> Error {
        Error::retry(
            "the process that owns the store lives but does not answer (stopped, frozen?): nothing \
             is hit or stored until the process answers or ends",
        )
        .with("pid", pid)
        .because(Self)
    }

    /// Whether `error` has this cause.
    #[must_use]
    pub fn caused(error: &Error) -> bool {
        error.source().is_some_and(<dyn StdError>::is::<Self>)
    }
}

/// The cause of an error: the owner reopens the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreReopening;

impl fmt::Display for StoreReopening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a write or sync of the store's disk failed")
    }
}

impl StdError for StoreReopening {}

impl StoreReopening {
    /// Returns the error for a call while the owner reopens the store; `why` describes the failed
    /// write or sync.
    #[must_use]
    pub fn error(why: &str) -> Error {
        Error::retry(
            "the store is reopened after a failed write or sync: nothing is hit or stored until \
             its disk takes writes again",
        )
        .with("why", why)
        .because(Self)
    }

    /// Whether `error` has this cause.
    #[must_use]
    pub fn caused(error: &Error) -> bool {
        error.source().is_some_and(<dyn StdError>::is::<Self>)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silent_and_reopening_owners_are_distinguished_from_other_errors() {
        assert!(OwnerSilent::caused(&OwnerSilent::error(7).with("dir", "d")));
        assert!(!OwnerSilent::caused(&Error::retry("busy")));
        let reopening = StoreReopening::error("EIO");
        assert!(StoreReopening::caused(&reopening) && !OwnerSilent::caused(&reopening));
        assert_eq!(reason(&reopening), Some("reopening"));
        assert_eq!(reason(&Error::retry("busy")), None);
    }
}

//! Distinguishes errors which mean that the owner was lost from all other errors.

use ritornello_format::Error;
use std::error::Error as StdError;
use std::{fmt, io};

/// The cause in an error which says that the process at the other end of a connection sends no
/// answer: it died or closed, or the connection failed. An owner may have executed the request
/// before it was lost; the client then finds the next owner, or becomes the owner.
#[derive(Debug)]
pub(crate) struct OwnerLost(io::Error);

impl fmt::Display for OwnerLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl StdError for OwnerLost {}

/// Returns the error for a lost owner; `cause` is the failure that revealed the loss.
pub(crate) fn owner_lost(cause: io::Error) -> Error {
    Error::retry("the store's owner died or closed the store, or the connection to it failed")
        .because(OwnerLost(cause))
}

pub(crate) fn is_owner_lost(error: &Error) -> bool {
    error.source().is_some_and(<dyn StdError>::is::<OwnerLost>)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_store::OwnerSilent;

    #[test]
    fn other_errors_do_not_count_as_a_lost_owner() {
        let cause = || io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(is_owner_lost(&owner_lost(cause()).with("dir", "d")));
        assert!(!is_owner_lost(&Error::retry("busy").because(cause())));
        assert!(!is_owner_lost(&Error::retry("busy")));
        assert!(
            !is_owner_lost(&OwnerSilent::error(7)) && !OwnerSilent::caused(&owner_lost(cause()))
        );
    }
}

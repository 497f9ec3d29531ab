//! How "nobody listens there any more" is told from an answer.

use ritornello_format::Error;
use std::error::Error as StdError;
use std::{fmt, io};

/// The cause of an error that says nothing about the question: the owner went away before it
/// answered. Whoever asked finds the next owner, or becomes it.
#[derive(Debug)]
pub(crate) struct Lost(io::Error);

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl StdError for Lost {}

/// The owner went away, as `cause` shows.
pub(crate) fn lost(cause: io::Error) -> Error {
    Error::retry("the process that owned the store went away").because(Lost(cause))
}

/// Whether `error` came about that way.
pub(crate) fn is_lost(error: &Error) -> bool {
    error.source().is_some_and(<dyn StdError>::is::<Lost>)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_store::OwnerSilent;

    #[test]
    fn only_a_lost_owner_counts_as_lost() {
        let cause = || io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(is_lost(&lost(cause()).with("dir", "d")));
        assert!(!is_lost(&Error::retry("busy").because(cause())));
        assert!(!is_lost(&Error::retry("busy")));
        assert!(!is_lost(&OwnerSilent::error(7)) && !OwnerSilent::caused(&lost(cause())));
    }
}

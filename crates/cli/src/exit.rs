//! How a command ends.

use ritornello_format::{Error, ErrorKind};
use ritornello_store::StoreReopening;
use rustix::io::Errno;
use std::error::Error as _;
use std::io;

/// The exit codes of the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// All is well.
    Fine,
    /// The command did its work, and found something wrong.
    Problems,
    /// The command was not understood, or the store cannot be opened.
    Unusable,
    /// Something failed on the way.
    Failed,
}

impl Status {
    /// As the process returns it.
    #[must_use]
    pub const fn code(self) -> i32 {
        match self {
            Self::Fine => 0,
            Self::Problems => 1,
            Self::Unusable => 2,
            Self::Failed => 3,
        }
    }
}

/// Why a command did not do its work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The exit status.
    pub status: Status,
    /// What happened, in one line.
    pub line: String,
    /// What to do about it; empty where the line says it.
    pub advice: String,
}

impl Failure {
    /// The command cannot work on what it was given.
    pub fn unusable(line: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { status: Status::Unusable, line: line.into(), advice: advice.into() }
    }

    /// Something failed on the way.
    pub fn failed(line: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { status: Status::Failed, line: line.into(), advice: advice.into() }
    }

    /// A store that cannot be opened.
    #[must_use]
    pub fn unopened(error: &Error) -> Self {
        let advice = match error.kind() {
            ErrorKind::Retry => "again in a moment; `ritornello doctor DIR` looks closer",
            ErrorKind::Fatal => "`ritornello fsck DIR`, or restore the directory from a copy",
            // The message says it.
            ErrorKind::Invalid | ErrorKind::Closed | ErrorKind::Miss => "",
        };
        let mut failure = Self::unusable(error.to_string(), advice);
        if StoreReopening::caused(error) || is_disk_failure(error) {
            // The command found a problem of the store, which is exit code 1.
            failure.status = Status::Problems;
            failure.advice = "the disk (dmesg): the owner reopens the store by itself".to_owned();
        }
        failure
    }
}

/// Whether the disk refused a read, a write or a sync.
fn is_disk_failure(error: &Error) -> bool {
    let io = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    io.and_then(io::Error::raw_os_error) == Some(Errno::IO.raw_os_error())
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let advice = match error.kind() {
            ErrorKind::Retry => "again; `ritornello doctor DIR` looks closer",
            ErrorKind::Fatal | ErrorKind::Miss => "`ritornello fsck DIR`",
            ErrorKind::Closed => "again: the store was closed meanwhile",
            ErrorKind::Invalid => "",
        };
        let status =
            if error.kind() == ErrorKind::Invalid { Status::Unusable } else { Status::Failed };
        Self { status, line: error.to_string(), advice: advice.into() }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::failed(error.to_string(), "`ritornello doctor DIR`")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_being_reopened_is_a_problem_found() {
        let failure = Failure::unopened(&StoreReopening::error("EIO"));
        assert_eq!(failure.status.code(), 1);
        assert!(failure.line.contains("EIO") && failure.advice.contains("reopens"), "{failure:?}");
        assert_eq!(Failure::unopened(&Error::retry("busy")).status.code(), 2);
        let refused =
            |errno: Errno| Error::invalid("a self-test failed").because(io::Error::from(errno));
        assert_eq!(Failure::unopened(&refused(Errno::IO)).status.code(), 1);
        assert_eq!(Failure::unopened(&refused(Errno::ACCESS)).status.code(), 2);
    }
}

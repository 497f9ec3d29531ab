//! Exit status and failures of commands.

use ritornello_format::{Error, ErrorKind};
use ritornello_store::StoreReopening;
use rustix::io::Errno;
use std::error::Error as _;
use std::io;

/// The exit codes of the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The command succeeded and found no problem.
    Fine,
    /// The command found a problem, or the store's disk fails so that the store cannot be opened.
    Problems,
    /// The command line or an argument is invalid, the store cannot be opened although its disk
    /// works, or a remote refused a call.
    Unusable,
    /// The command failed during its work, or a remote did not answer.
    Failed,
}

impl Status {
    /// Returns the exit code of the process.
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

/// The reason why a command failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The exit status.
    pub status: Status,
    /// The error, in one line.
    pub line: String,
    /// Advice for the user, printed after `try:`; empty if [`line`](Self::line) says it.
    pub advice: String,
}

impl Failure {
    /// Returns a failure with the status [`Status::Unusable`].
    pub fn unusable(line: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { status: Status::Unusable, line: line.into(), advice: advice.into() }
    }

    /// Returns a failure with the status [`Status::Failed`].
    pub fn failed(line: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { status: Status::Failed, line: line.into(), advice: advice.into() }
    }

    /// Returns the failure of a command that could not open a store because of `error`.
    #[must_use]
    pub fn unopened(error: &Error) -> Self {
        let advice = match error.kind() {
            ErrorKind::Retry => "again in a moment; `ritornello doctor DIR` shows details",
            ErrorKind::Fatal => "`ritornello fsck DIR`, or restore the directory from a copy",
            // The error's message names the remedy.
            ErrorKind::Invalid | ErrorKind::Closed | ErrorKind::Miss => "",
        };
        let mut failure = Self::unusable(error.to_string(), advice);
        if StoreReopening::caused(error) || is_disk_failure(error) {
            // The command found a problem of the store: exit code 1.
            failure.status = Status::Problems;
            failure.advice =
                "check the disk (dmesg); the owner reopens the store automatically".to_owned();
        }
        failure
    }

    /// Returns the failure of a command whose call to a remote failed with `error`.
    #[must_use]
    pub fn from_remote(error: Error) -> Self {
        match error.kind() {
            ErrorKind::Retry => Self::failed(
                error.to_string(),
                "again; `ritornello doctor --backend ADDRESS` shows details",
            ),
            // The error's message names the remedy.
            _ => Self::unusable(error.to_string(), ""),
        }
    }
}

/// Returns whether the cause of `error` is `EIO`: the disk failed a read, a write or a sync.
fn is_disk_failure(error: &Error) -> bool {
    let io = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    io.and_then(io::Error::raw_os_error) == Some(Errno::IO.raw_os_error())
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let advice = match error.kind() {
            ErrorKind::Retry => "again; `ritornello doctor DIR` shows details",
            ErrorKind::Fatal | ErrorKind::Miss => "`ritornello fsck DIR`",
            ErrorKind::Closed => "again: the store was closed before the call ended",
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
    fn failed_opening_sets_exit_status_by_its_cause() {
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

//! Limits handshakes with an owner that has no protocol version in common with this build to one
//! per second.

use crate::greeting::{OWNER, OtherVersion};
use crate::record_lock::LockHolder;
use parking_lot::Mutex;
use ritornello_format::{Error, Result};
use std::time::{Duration, Instant};

/// The pause between two handshakes with an owner that has no version in common with this build.
const PAUSE: Duration = Duration::from_secs(1);

/// The last owner that has no version in common with this build: its process, the time of the
/// handshake, and the versions that it speaks.
#[derive(Debug, Default)]
pub(crate) struct OwnerMismatch(Mutex<Option<(LockHolder, Instant, OtherVersion)>>);

impl OwnerMismatch {
    /// Checks that the last handshake with `owner` did not fail by a version mismatch less than
    /// [`PAUSE`] ago.
    ///
    /// # Errors
    /// `Retry`, the error of the last handshake with `owner`.
    pub(crate) fn check(&self, owner: LockHolder) -> Result<()> {
        match *self.0.lock() {
            Some((noted, at, versions)) if noted == owner && at.elapsed() < PAUSE => {
                Err(versions.error(OWNER))
            }
            _ => Ok(()),
        }
    }

    /// Records the owner if `error` is a version mismatch.
    pub(crate) fn note(&self, owner: LockHolder, error: &Error) {
        if let Some(versions) = OtherVersion::of(error) {
            *self.0.lock() = Some((owner, Instant::now(), versions));
        }
    }
}

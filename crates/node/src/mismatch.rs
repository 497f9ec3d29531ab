//! An owner that speaks no version of this build is asked again once a second, and not by every call.

use crate::greeting::OtherVersion;
use crate::record_lock::Holder;
use parking_lot::Mutex;
use ritornello_format::{Error, Result};
use std::time::{Duration, Instant};

/// The pause between two attempts.
const PAUSE: Duration = Duration::from_secs(1);

/// The owner that was found to speak other versions, and when.
#[derive(Debug, Default)]
pub(crate) struct OwnerMismatch(Mutex<Option<(Holder, Instant, OtherVersion)>>);

impl OwnerMismatch {
    /// # Errors
    /// The error noted for this owner less than [`PAUSE`] ago.
    pub(crate) fn check(&self, owner: Holder) -> Result<()> {
        match *self.0.lock() {
            Some((noted, at, versions)) if noted == owner && at.elapsed() < PAUSE => {
                Err(versions.of_owner())
            }
            _ => Ok(()),
        }
    }

    /// Notes why the owner was of no use, if that is its version.
    pub(crate) fn note(&self, owner: Holder, error: &Error) {
        if let Some(versions) = OtherVersion::of(error) {
            *self.0.lock() = Some((owner, Instant::now(), versions));
        }
    }
}

//! Fences of puts from a device.

use ritornello_device::SaveFence;
use ritornello_device::driver::RawStream;
use ritornello_format::Result;
use std::time::{Duration, Instant};

/// Time for which [`Fence::order`] waits if the caller gives none.
const FENCE_TIME: Duration = Duration::from_secs(30);

/// Orders writes to the blocks of a save.
#[derive(Clone)]
pub(crate) struct Fence(SaveFence);

impl Fence {
    pub(crate) fn new(fence: SaveFence) -> Self {
        Self(fence)
    }

    /// Makes later work of `stream`, or without a stream this thread, wait until the blocks were
    /// read.
    pub(crate) fn order(&self, stream: Option<u64>, deadline: Option<Instant>) -> Result<bool> {
        let deadline = deadline.unwrap_or_else(|| Instant::now() + FENCE_TIME);
        match stream {
            // SAFETY: the Python caller passes a stream that exists.
            Some(stream) => unsafe { self.0.fence(RawStream(stream), deadline) },
            None => self.0.wait(deadline),
        }
    }
}

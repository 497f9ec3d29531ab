//! Fences of puts from a device: later writes to a put's blocks wait until the put has read them.

use ritornello_device::SaveFence;
use ritornello_device::driver::RawStream;
use ritornello_format::Result;
use std::time::{Duration, Instant};

/// Default timeout of [`Fence::order`].
const FENCE_TIME: Duration = Duration::from_secs(30);

/// The fence of one put: orders writes to the put's blocks after the put has read them.
#[derive(Clone)]
pub(crate) struct Fence(SaveFence);

impl Fence {
    pub(crate) fn new(fence: SaveFence) -> Self {
        Self(fence)
    }

    /// Makes later work of `stream` wait until the put has read its blocks, and returns when the
    /// reads are queued on the device. Without a stream, returns when the put has read its blocks.
    /// Returns `false` if `deadline` passes first.
    pub(crate) fn order(&self, stream: Option<u64>, deadline: Option<Instant>) -> Result<bool> {
        let deadline = deadline.unwrap_or_else(|| Instant::now() + FENCE_TIME);
        match stream {
            // SAFETY: the Python caller passes a stream that exists.
            Some(stream) => unsafe { self.0.fence(RawStream(stream), deadline) },
            None => self.0.wait(deadline),
        }
    }
}

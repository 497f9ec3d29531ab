//! The result of a put or a get.

use std::time::Duration;

/// The result of a put or a get, page by page.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Leading pages stored (put), or filled and verified (get).
    pub pages: usize,
    /// Payload bytes that the put wrote, or that the get read and verified.
    pub bytes: u64,
    /// Duration of the call.
    pub seconds: f64,
    /// The reason why a page failed; empty if all pages succeeded.
    pub reason: &'static str,
    /// By page, whether it is stored (put), or filled and verified (get). A put counts no page
    /// after the first page that is not stored.
    pub ok: Vec<bool>,
}

impl Outcome {
    /// The outcome if no page succeeded, for one reason.
    #[must_use]
    pub fn none(pages: usize, reason: &'static str) -> Self {
        Self { reason, ok: vec![false; pages], ..Self::default() }
    }

    pub(crate) fn timed(mut self, elapsed: Duration) -> Self {
        self.seconds = elapsed.as_secs_f64();
        self
    }
}

#[derive(Default)]
pub(crate) struct PutProgress {
    /// Leading pages that are stored.
    pub(crate) stored: usize,
    /// Payload bytes written, before encoding; `encoded_bytes` are the same pages after encoding,
    /// without padding, and `disk_bytes` the bytes that they take on disk.
    pub(crate) bytes: u64,
    pub(crate) encoded_bytes: u64,
    pub(crate) disk_bytes: u64,
    pub(crate) reason: &'static str,
    /// Whether the put must be flushed before it is acknowledged.
    pub(crate) unflushed: bool,
}

impl PutProgress {
    pub(crate) fn add(&mut self, part: &Self) {
        self.stored += part.stored;
        self.bytes += part.bytes;
        self.encoded_bytes += part.encoded_bytes;
        self.disk_bytes += part.disk_bytes;
        self.reason = part.reason;
        self.unflushed |= part.unflushed;
    }

    /// Returns the outcome. Only leading pages count as stored, not pages after a gap.
    pub(crate) fn outcome(&self, requested: usize) -> Outcome {
        let mut ok = vec![false; requested];
        ok[..self.stored].fill(true);
        let reason = if self.stored == requested { "" } else { self.reason };
        Outcome { pages: self.stored, bytes: self.bytes, seconds: 0.0, reason, ok }
    }
}

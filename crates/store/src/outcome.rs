//! The result of a put or a get.

use std::time::Duration;

/// The result of a put or a get, page by page.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Leading pages stored (put), or filled and verified (get).
    pub pages: usize,
    /// Payload bytes moved.
    pub bytes: u64,
    /// Duration of the call.
    pub seconds: f64,
    /// Why the first failed page failed; empty if all succeeded.
    pub reason: &'static str,
    /// Success by page.
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

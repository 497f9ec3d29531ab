//! What a put or a get came to.

use std::time::Duration;

/// What a put or a get came to, page by page.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Leading pages stored (put), or filled and verified (get).
    pub pages: usize,
    /// Payload bytes moved.
    pub bytes: u64,
    /// Time from the call to the end.
    pub seconds: f64,
    /// Why the first page that did not come did not; empty if all came.
    pub reason: &'static str,
    /// Page by page.
    pub ok: Vec<bool>,
}

impl Outcome {
    /// Nothing came, for one reason.
    #[must_use]
    pub fn none(pages: usize, reason: &'static str) -> Self {
        Self { reason, ok: vec![false; pages], ..Self::default() }
    }

    pub(crate) fn timed(mut self, elapsed: Duration) -> Self {
        self.seconds = elapsed.as_secs_f64();
        self
    }
}

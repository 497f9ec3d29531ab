//! Statistics of payload that this process moved.

use crate::stats::{CatalogStats, Counter};
use crate::transfer_counts::{
    GET_BYTES, GET_MICROS, GETS, PUT_MICROS, PUTS, READ_PAGES, STAGING_REFUSALS, TransferTotals,
    UNANSWERED,
};
use serde::Serialize;

/// Counters of payload that this process moved.
#[derive(Debug, Default)]
pub(crate) struct TransferCounters {
    /// The counts that are also reported to the owner.
    pub(crate) totals: TransferTotals,
    pub(crate) put_bytes: Counter,
    pub(crate) put_stored_bytes: Counter,
}

/// The catalog's statistics and this process's transfers.
#[derive(Clone, Debug, Serialize)]
pub struct StoreStats {
    /// The owner's statistics.
    #[serde(flatten)]
    pub catalog: CatalogStats,
    /// This process's transfers.
    pub transfer: TransferStats,
}

/// Payload that this process moved.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TransferStats {
    /// Puts that wrote pages.
    pub puts: u64,
    /// Payload bytes written.
    pub put_bytes: u64,
    /// Bytes on disk of the payload that puts wrote: encoded, with headers and padding.
    pub put_stored_bytes: u64,
    /// Sum of the durations of the counted puts in seconds; concurrent puts each count in full.
    pub put_seconds: f64,
    /// Gets of registered scopes, with hits or without.
    pub gets: u64,
    /// Payload bytes read and verified.
    pub get_bytes: u64,
    /// Sum of the durations of the counted gets in seconds; concurrent gets each count in full.
    pub get_seconds: f64,
    /// Pages read and verified.
    pub read_pages: u64,
    /// Pages of gets that the owner located and that were not delivered, for example because they
    /// failed verification.
    pub missed_pages: u64,
    /// Pages of puts that copy into staging, skipped because staging was full.
    pub staging_refusals: u64,
    /// Staging memory that copies of pages use now, in bytes. Excludes the staging of transfers.
    pub staging_bytes: u64,
    /// Lookups and gets answered with a miss, and puts skipped, because the owner was alive but did
    /// not respond, or was reopening the store.
    pub unanswered: u64,
}

impl TransferCounters {
    /// Returns the statistics; `staging_bytes` of staging memory are in use.
    pub(crate) fn stats(&self, staging_bytes: u64) -> TransferStats {
        let totals = &self.totals;
        TransferStats {
            puts: totals.get(PUTS),
            put_bytes: self.put_bytes.get(),
            put_stored_bytes: self.put_stored_bytes.get(),
            put_seconds: totals.get(PUT_MICROS) as f64 / 1e6,
            gets: totals.get(GETS),
            get_bytes: totals.get(GET_BYTES),
            get_seconds: totals.get(GET_MICROS) as f64 / 1e6,
            read_pages: totals.get(READ_PAGES),
            missed_pages: totals.undelivered(),
            staging_refusals: totals.get(STAGING_REFUSALS),
            staging_bytes,
            unanswered: totals.get(UNANSWERED),
        }
    }
}

//! Puts: reserve, write, commit; in parts if the pages are encoded.

use crate::catalog::{Refusal, ReserveRequest, Reserved, ReservedRun, ScopeRef};
use crate::commit_order::CommitOrder;
use crate::encode::{Encoder, raw_slices};
use crate::outcome::{Outcome, PutProgress};
use crate::parts::{Part, Parts};
use crate::store::{DEFAULT_TIMEOUT, PutOptions, Store};
use crate::transfer_counts::TransferCounts;
use parking_lot::Mutex;
use ritornello_format::{ErrorKind, Result, RunHeader, Scope, UNIT};
use ritornello_volume::page_memory::{BorrowedPages, OffsetPages, PageSource};
use ritornello_volume::run_on_threads;
use ritornello_volume::transfer::{Control, MissReason, RunWrite, failed_volume};
use std::panic::resume_unwind;
use std::time::Instant;

/// Reason of a put that ends at a page whose bytes it lacks and which is not stored, for example
/// because the page was evicted after the caller found it.
const NOT_FOUND: &str = "not_found";

/// The state shared by all parts of a put.
struct Put<'a> {
    store: &'a Store,
    scope: ScopeRef,
    keys: &'a [&'a [u8]],
    /// Number of leading pages whose bytes the put lacks, because its caller found them stored. The
    /// put acknowledges them only if the owner still reports them as present.
    without_bytes: usize,
    options: &'a PutOptions,
    control: &'a Control,
    /// Whether this put is committed in parts; in `durable` mode it is flushed after the last part.
    in_parts: bool,
}

impl Store {
    /// Stores pages, and skips pages already present. `source` has one page per key.
    ///
    /// # Errors
    /// `Invalid` for malformed keys, sizes or scopes; `Closed`; `Retry` while the store is
    /// poisoned, or if this client has too many leases or leased runs; errors of the connection to
    /// the owner. If pages are not stored for another reason, the outcome names it.
    pub fn put_batch(
        &self,
        scope: &Scope,
        keys: &[&[u8]],
        source: &dyn PageSource,
        options: &PutOptions,
        control: &Control,
    ) -> Result<Outcome> {
        self.check_batch(keys, source.len())?;
        if let Some(reason) = control.stop() {
            return Ok(Outcome::none(keys.len(), reason.word()));
        }
        let started = Instant::now();
        let outcome = self.retry_stale(&[scope], || match self.registered(scope) {
            // The registry has no room or no number for a new scope, so its pages cannot be put.
            Err(error) if error.kind() == ErrorKind::Miss => {
                tracing::debug!(%error, "a put of a new scope was refused");
                Ok(Outcome::none(keys.len(), "scopes"))
            }
            scope_ref => self.put(scope_ref?, scope, keys, source, options, control),
        });
        let outcome = self.or_miss(outcome, |reason| Outcome::none(keys.len(), reason))?;
        Ok(outcome.timed(started.elapsed()))
    }

    /// Acknowledges pages that are already stored, as a put of these pages would, without needing
    /// their bytes. In `durable` mode the pages are durable when the call returns; otherwise the
    /// next sync, in the background or in `flush`, makes them durable. Returns the number of
    /// leading pages stored.
    ///
    /// # Errors
    /// Like `put_batch`.
    pub fn put_stored(
        &self,
        scope: &Scope,
        keys: &[&[u8]],
        options: &PutOptions,
        control: &Control,
    ) -> Result<usize> {
        let none = BorrowedPages::new(&[]);
        let source = OffsetPages::new(&none, keys.len());
        Ok(self.put_batch(scope, keys, &source, options, control)?.pages)
    }

    fn put(
        &self,
        reference: ScopeRef,
        scope: &Scope,
        keys: &[&[u8]],
        source: &dyn PageSource,
        options: &PutOptions,
        control: &Control,
    ) -> Result<Outcome> {
        let started = Instant::now();
        let (without_bytes, in_parts) = (source.without_bytes(), false);
        let put =
            Put { store: self, scope: reference, keys, without_bytes, options, control, in_parts };
        let written = match Encoder::of(scope, reference.codec, reference.page_bytes)? {
            None => put.write(0, keys.len(), source)?,
            Some(encoder) => put.encode(&encoder, source)?,
        };
        if written.bytes > 0 {
            let (bytes, encoded) = (written.bytes, written.encoded_bytes);
            self.count(&TransferCounts::put(started.elapsed(), bytes, encoded));
            self.transfers.put_bytes.add(written.bytes);
            self.transfers.put_stored_bytes.add(written.disk_bytes);
        }
        if control.stop().is_none()
            && let Some(speeds) = self.segments.new_speeds()
        {
            // If the report fails, the owner uses the volumes' previous speeds until the next
            // measurement.
            let _ = self.catalog.report_speeds(&speeds);
        }
        Ok(written.outcome(keys.len()))
    }
}

impl Put<'_> {
    /// Encodes and writes the missing pages; a part is encoded while the previous part is written.
    fn encode(&self, encoder: &Encoder, source: &dyn PageSource) -> Result<PutProgress> {
        let mut present = self.store.catalog.exists(self.scope, self.keys)?;
        // The first `without_bytes` pages have no bytes to encode, so they count as present here.
        // The reservation of their part shows whether they are stored.
        present[..self.without_bytes].fill(true);
        if !present.contains(&false) {
            return self.write(0, self.keys.len(), source);
        }
        let parts = Parts {
            segments: &self.store.segments,
            scope: self.scope,
            encoder,
            source,
            control: self.control,
            present,
            at: 0,
            starved: false,
        };
        let in_parts = !parts.is_single();
        let put = Put { in_parts, ..*self };
        let (parts, order) = (Mutex::new((0, parts)), CommitOrder::new());
        let threads = if in_parts { 2 } else { 1 };
        let written = run_on_threads(threads, "ritornello-put", || put.write_parts(&parts, &order));
        written.into_iter().for_each(|part| part.unwrap_or_else(|panic| resume_unwind(panic)));
        let mut all = order.into_written()?;
        if all.unflushed {
            self.store.catalog.flush()?;
            // If the owner died before the flush, commits of earlier parts may be lost.
            all.stored = all.stored.min(self.store.catalog.probe(self.scope, self.keys)?);
        }
        if all.stored < self.keys.len() && all.reason.is_empty() {
            all.reason = self.control.stop().map_or("io", |stop| stop.word());
        }
        Ok(all)
    }

    /// Encodes and writes the remaining parts, and commits them in order.
    fn write_parts(&self, parts: &Mutex<(usize, Parts<'_>)>, order: &CommitOrder) {
        loop {
            let (turn, part) = {
                let mut parts = parts.lock();
                let Some(part) = parts.1.next() else { return };
                parts.0 += 1;
                (order.turn(parts.0 - 1), part)
            };
            let keys = part.keys.len();
            let prepared = self.prepare(part.keys.start, keys, &part.pages, Some(&part));
            // Free the memory of this part, for the next part, before waiting for earlier parts to
            // commit or for a sync.
            drop(part);
            if !turn.commit(keys, || prepared.and_then(|prepared| prepared.commit(self, keys))) {
                return;
            }
        }
    }

    /// Writes the missing pages among the `count` pages starting at `first`, and makes them
    /// visible.
    fn write(&self, first: usize, count: usize, source: &dyn PageSource) -> Result<PutProgress> {
        self.prepare(first, count, source, None)?.commit(self, count)
    }

    /// Reserves and writes the missing pages among the `count` pages starting at `first`. `source`
    /// has these pages. If `part` is given, `source` is this part's pages, some of them encoded.
    fn prepare(
        &self,
        first: usize,
        count: usize,
        source: &dyn PageSource,
        part: Option<&Part<'_>>,
    ) -> Result<PreparedPart<'_>> {
        let keys = &self.keys[first..first + count];
        let before = first.checked_sub(1).map(|before| self.keys[before]);
        let parent = before.or(self.options.parent.as_deref());
        let (store, control) = (self.store, self.control);
        let timeout = control
            .deadline
            .map_or(DEFAULT_TIMEOUT, |deadline| deadline.saturating_duration_since(Instant::now()));
        let request = ReserveRequest {
            page_units: part.map_or_else(Vec::new, Part::units),
            slices_per_page: slices_per_page(self.scope, part),
            retain_until: self.options.retain_until,
            timeout,
            flushed_later: self.in_parts,
        };
        let reserved = store.catalog.reserve(self.scope, keys, parent, &request)?;
        let refused = reserved.refused.map_or("", |refusal| refusal.word());
        let (sums, encoded) = (Vec::new(), Vec::new());
        let mut prepared = PreparedPart { store, reserved, sums, encoded, reason: refused };
        let reserved = &prepared.reserved;
        if reserved.runs.is_empty() {
            return Ok(prepared);
        }
        let lacks = |run: &ReservedRun| first + (run.at as usize) < self.without_bytes;
        let lost = reserved.runs.iter().any(lacks);
        // If a page whose bytes this put lacks is no longer stored, write nothing in a chained
        // scope: no page can be stored after the missing page.
        let writable = |run: &ReservedRun| !(lacks(run) || lost && self.scope.chained);
        let runs: Vec<&ReservedRun> = reserved.runs.iter().filter(|run| writable(run)).collect();
        let headers: Vec<RunHeader> =
            runs.iter().map(|run| header(reserved, run, self.scope, keys, parent, part)).collect();
        let writes: Vec<RunWrite<'_>> = runs
            .iter()
            .zip(&headers)
            .map(|(run, header)| RunWrite {
                place: &run.place,
                header,
                source,
                first: run.at as usize,
            })
            .collect();
        let mut results = store.segments.write_runs(&writes, control).into_iter();
        let (mut reason, mut failed_volumes) = (refused, Vec::new());
        let written = |run: &ReservedRun| {
            let result = if writable(run) { results.next()? } else { return None };
            result
                .inspect_err(|error| {
                    tracing::warn!(%error, "a run could not be written");
                    let is_stalled = store.segments.is_stalled(&run.place);
                    let failed = if is_stalled { MissReason::Stalled } else { MissReason::Io };
                    reason = control.stop().unwrap_or(failed).word();
                    failed_volumes.extend(failed_volume(error));
                })
                .ok()
        };
        prepared.sums = reserved.runs.iter().map(written).collect();
        let encoded = |run: &ReservedRun| encoded_bytes(run, self.scope, part);
        prepared.encoded = reserved.runs.iter().map(encoded).collect();
        prepared.reason = if lost { NOT_FOUND } else { reason };
        failed_volumes.sort_unstable();
        failed_volumes.dedup();
        if !failed_volumes.is_empty() {
            // If the report fails, the owner learns of the volume's failures from a later report.
            let _ = store.catalog.report_failed_writes(reserved.id, &failed_volumes);
        }
        Ok(prepared)
    }
}

/// A reservation that is neither committed nor aborted. A drop of this value, for example after an
/// error or a panic, aborts the reservation: the owner can reuse the space without a delay, because
/// this process no longer writes to it.
struct PreparedPart<'a> {
    store: &'a Store,
    /// The reservation, which has no runs if no page was missing, or if the owner refused every
    /// missing page.
    reserved: Reserved,
    /// For each reserved run the checksum of its header; `None` if it was not written.
    sums: Vec<Option<u64>>,
    /// For each reserved run the bytes of its pages after encoding.
    encoded: Vec<u64>,
    reason: &'static str,
}

impl PreparedPart<'_> {
    /// Makes the written runs visible. The part has `count` pages.
    fn commit(mut self, put: &Put<'_>, count: usize) -> Result<PutProgress> {
        let reserved = &self.reserved;
        let mut written =
            PutProgress { stored: reserved.present, reason: self.reason, ..PutProgress::default() };
        written.unflushed = reserved.durable && put.in_parts && written.stored > 0;
        if reserved.runs.is_empty() {
            return Ok(written);
        }
        let committed = self.store.catalog.commit(reserved.id, &self.sums)?;
        written.stored = committed.stored;
        written.unflushed = reserved.durable && put.in_parts;
        if written.stored < count && written.reason.is_empty() {
            written.reason = committed.refused.map_or("superseded", Refusal::word);
        }
        let runs = reserved.runs.iter().zip(&self.encoded).zip(&self.sums);
        for ((run, encoded), _) in runs.filter(|(_, sum)| sum.is_some()) {
            written.bytes += u64::from(run.pages) * put.scope.page_bytes;
            written.encoded_bytes += encoded;
            written.disk_bytes += run.place.units() * UNIT;
        }
        self.reserved.runs.clear();
        Ok(written)
    }
}

impl Drop for PreparedPart<'_> {
    fn drop(&mut self) {
        if !self.reserved.runs.is_empty() {
            // If the abort fails, the owner frees the space when this process ends.
            let _ = self.store.catalog.abort(self.reserved.id);
        }
    }
}

/// The bytes of the pages of a run after encoding, without padding.
fn encoded_bytes(run: &ReservedRun, scope: ScopeRef, part: Option<&Part<'_>>) -> u64 {
    let (at, pages) = (run.at as usize, run.pages as usize);
    part.map_or(pages as u64 * scope.page_bytes, |part| part.encoded_bytes(at..at + pages))
}

fn slices_per_page(scope: ScopeRef, part: Option<&Part<'_>>) -> u16 {
    part.map_or_else(|| raw_slices(scope.page_bytes), Part::slices_per_page)
}

fn header(
    reserved: &Reserved,
    run: &ReservedRun,
    scope: ScopeRef,
    keys: &[&[u8]],
    parent: Option<&[u8]>,
    part: Option<&Part<'_>>,
) -> RunHeader {
    let at = run.at as usize;
    let pages = at..at + run.pages as usize;
    let before = at.checked_sub(1).map(|before| keys[before]).or(parent);
    RunHeader {
        store: reserved.store,
        scope: scope.id,
        slot: scope.slot,
        generation: run.place.generation,
        page_bytes: scope.page_bytes,
        header_units: run.place.header_units,
        page_units: run.place.page_units,
        parent: before.filter(|_| scope.chained).map(<[u8]>::to_vec),
        extents: run.place.extents.clone(),
        extents_total: run.place.extents.len() as u32,
        keys: keys[pages.clone()].iter().collect(),
        slices_per_page: slices_per_page(scope, part),
        slices: part.map_or_else(Vec::new, |part| part.slices(pages)),
    }
}

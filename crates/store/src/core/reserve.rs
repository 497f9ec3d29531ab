//! Reserving space for a put: groups the missing pages into runs and places each of them.

use super::StoreCore;
use super::limits::admission::Admitted;
use super::miss_causes::MissCause;
use super::reservations::{PlannedRun, Reservation};
use super::space::SpaceDeadline;
use crate::catalog::{
    LeaseNumber, PUT_PAGES_MAX, Refusal, ReserveRequest, Reserved, ReservedRun, ScopeRef,
};
use crate::client_id::ClientId;
use crate::eviction::Demand;
use ritornello_format::{
    Error, KEY_BYTES_MAX, PageHash, Place, Result, RunHeader, UNIT, check_keys, units_of,
};
use ritornello_index::RunId;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Duration of the lease on the stored pages that a put's missing pages follow; a put that takes
/// longer may fail at commit.
const PUT_LEASE: Duration = Duration::from_secs(600);
/// Maximum payload of a run of several pages, which keeps eviction and reads fine-grained.
const RUN_BYTES_MAX: u64 = 64 << 20;
/// Maximum payload of a run of several pages in a store on several volumes. The volumes take runs
/// in turn, in proportion to their speeds, so a get of a few runs uses several volumes.
const STRIPE_BYTES_MAX: u64 = 16 << 20;
/// Lower limit of the maximum payload of a run in a store on several volumes: a short put is cut
/// into fewer runs than there are volumes rather than into shorter runs, because the header and the
/// I/O operation of a shorter run cost more time than the use of one more disk saves.
const STRIPE_BYTES_MIN: u64 = 4 << 20;
/// Encoded pages of different length share a run if padding is at most 1/`PADDING_SHARE` of the
/// run, or at most [`PADDING_UNITS`].
const PADDING_SHARE: u64 = 32;
/// Maximum units of padding in a short run: a separate run would cost more, a header on disk and an
/// I/O operation in each read.
const PADDING_UNITS: u64 = 8;

/// A put that requests space.
struct PutBatch<'a> {
    client: ClientId,
    scope: ScopeRef,
    request: &'a ReserveRequest,
    keys: &'a [&'a [u8]],
    hashes: Vec<PageHash>,
    /// The page before the first page of the put, if known.
    parent: Option<PageHash>,
    parent_present: bool,
    /// For each page, whether it is stored.
    present: Vec<bool>,
}

/// Runs for which space was found.
#[derive(Default)]
struct PlacedRuns {
    runs: Vec<PlannedRun>,
    /// Units that count towards the scope's quota until the reservation counts them.
    promised: u64,
    /// Why some pages got no space, if any.
    refused: Option<Refusal>,
}

impl StoreCore {
    /// Reserves space for the missing pages of a put, as far as the limits of the store, the scope
    /// and the client allow.
    pub(super) fn reserve(
        &self,
        client: ClientId,
        scope: ScopeRef,
        keys: &[&[u8]],
        parent: Option<&[u8]>,
        request: &ReserveRequest,
    ) -> Result<Reserved> {
        self.lifecycle.check_writable()?;
        self.scopes.check(scope)?;
        let deadline = Instant::now() + request.timeout;
        let mut put = PutBatch::checked(client, scope, keys, parent, request)?;
        self.shape.ensure_numbers(deadline)?;
        let until = SpaceDeadline::until(deadline);
        let absent = self.cut_before_absent(&mut put);
        self.find_present(&mut put);
        let mut reserved = Reserved {
            id: 0,
            store: self.shape.manifest().uuid,
            runs: Vec::new(),
            present: put.present.iter().take_while(|present| **present).count(),
            refused: absent,
            durable: self.durable_puts(),
        };
        if reserved.present == put.hashes.len() {
            self.link_and_count(scope.slot, scope.chained, &put.hashes);
            self.retain(scope.slot, &put.hashes, request.retain_until);
            // Another put of these pages may be visible and not durable yet.
            self.await_durable_put(request.flushed_later)?;
            return Ok(reserved);
        }
        // An explanation finds the pages here until their reservation is open or their miss cause
        // is noted.
        let pending = self.note_pending(scope.slot, &put.hashes);
        let lease = self.lease_parents(&put)?;
        self.report_demand(&put);
        let admitted = self.admit(scope, &put.hashes, &put.present, request);
        let placed = self.place_runs(&put, &admitted, until);
        reserved.refused = placed.refused.or(absent);
        let PutBatch { hashes, present, .. } = &put;
        self.count_refused(hashes, present, &admitted, &placed.runs, reserved.refused);
        if placed.runs.is_empty() {
            drop(pending);
            self.end_unplaced(&put, lease, placed.promised)?;
            return Ok(reserved);
        }
        let granted = |run: &PlannedRun| ReservedRun {
            place: run.place.clone(),
            at: run.at,
            pages: run.pages,
        };
        reserved.runs = placed.runs.iter().map(granted).collect();
        reserved.id = self.shape.unique_number();
        self.open_reservation(reserved.id, put, lease, placed)?;
        Ok(reserved)
    }

    /// Shortens the put to the pages before its first hidden page: a hidden page can neither be
    /// read nor stored again. Nothing is left of a chained put whose parent is hidden. Returns the
    /// reason if it shortened the put.
    fn cut_before_absent(&self, put: &mut PutBatch<'_>) -> Option<Refusal> {
        let is_hidden = |page: &PageHash| self.is_hidden(put.scope.slot, *page);
        let end = match put.parent.as_ref().is_some_and(is_hidden) && put.scope.chained {
            true => 0,
            false => put.hashes.iter().position(is_hidden)?,
        };
        // Count the pages that are cut off, because `count_refused` does not receive them.
        let cut = (put.hashes.len() - end) as u64;
        self.counters.refused_absent_space.add(cut);
        self.counters.refused_pages.add(cut);
        self.miss_causes.note(put.hashes.drain(end..), MissCause::Refused(Refusal::Absent));
        put.keys = &put.keys[..end];
        Some(Refusal::Absent)
    }

    /// Looks up which pages of the put are stored, and whether the page before them is.
    fn find_present(&self, put: &mut PutBatch<'_>) {
        let slot = put.scope.slot;
        put.parent_present = put.parent.is_some_and(|page| self.index.locate(slot, page).is_some());
        put.present = self.index.exists(slot, &put.hashes);
        let present = put.present.iter().filter(|present| **present).count();
        self.counters.present_pages.add(present as u64);
    }

    /// Leases the runs that the missing pages follow, and the run of the put's parent, so that
    /// these runs are not evicted before the commit. The ancestors of these runs need no lease,
    /// because eviction removes leaves first.
    fn lease_parents(&self, put: &PutBatch<'_>) -> Result<LeaseNumber> {
        if !put.scope.chained {
            return Ok(LeaseNumber::default());
        }
        let PutBatch { hashes, present, parent, .. } = put;
        let before_gaps = (1..hashes.len()).filter(|&at| !present[at] && present[at - 1]);
        let pages = before_gaps.map(|at| hashes[at - 1]).chain(*parent);
        let mut state = self.state.lock();
        let run_of = |page| self.index.locate(put.scope.slot, page).map(|(run, _)| run);
        let mut runs: Vec<RunId> = pages.filter_map(run_of).collect();
        runs.sort_unstable();
        runs.dedup();
        if runs.is_empty() {
            return Ok(LeaseNumber::default());
        }
        state.leases.grant(&runs, PUT_LEASE, put.client).map(LeaseNumber)
    }

    /// Reports the missing pages to the eviction policy: one report for each sequence of
    /// consecutive missing pages.
    fn report_demand(&self, put: &PutBatch<'_>) {
        let mut state = self.state.lock();
        let mut at: usize = 0;
        for gap in put.present.chunk_by(|a, b| a == b) {
            if !gap[0] {
                let pages = &put.hashes[at..at + gap.len()];
                state.residents.demanded(Demand::Write, put.before(at), pages.iter().copied());
            }
            at += gap.len();
        }
    }

    /// Places the runs of the admitted pages in order, until the placement of a run is refused.
    fn place_runs(
        &self,
        put: &PutBatch<'_>,
        admitted: &Admitted,
        until: SpaceDeadline,
    ) -> PlacedRuns {
        let most = self.run_units_max(put, admitted.end);
        let mut placed = PlacedRuns { refused: admitted.refused, ..PlacedRuns::default() };
        let mut from = 0;
        while let Some(pages) = put.next_run(from, admitted.end, most) {
            from = pages.end;
            let units = admitted.run_units(pages.len());
            match self.place_run(put, pages.clone(), units, &mut placed.promised, until) {
                Ok(run) => placed.runs.push(run),
                Err(refusal) => {
                    if refusal == Refusal::NoSpace {
                        let (header_units, page_units) = put.run_lengths(pages);
                        let units = u64::from(header_units) + u64::from(page_units);
                        self.warn_if_too_large(put.client, put.scope, units);
                    }
                    return PlacedRuns { refused: Some(refusal), ..placed };
                }
            }
        }
        placed
    }

    /// Maximum units of the payload of a run of several pages, if the missing pages before `end`
    /// are written.
    fn run_units_max(&self, put: &PutBatch<'_>, end: usize) -> u64 {
        let most = RUN_BYTES_MAX.min(self.shape.budget().segment_bytes / 2);
        let volumes = self.state.lock().space.allocator().usable_volumes() as u64;
        let bytes = UNIT * put.missing_units(end);
        most.min(stripe_bytes(bytes, volumes)) / UNIT
    }

    /// Finds space for one run of at most `units` units. Adds `units` to `promised`, even if no
    /// space is found, unless the index, the client's share or the scope's quota refuses the run.
    fn place_run(
        &self,
        put: &PutBatch<'_>,
        pages: Range<usize>,
        units: u64,
        promised: &mut u64,
        until: SpaceDeadline,
    ) -> std::result::Result<PlannedRun, Refusal> {
        if !self.index_takes(&put.hashes[pages.clone()]) {
            return Err(Refusal::IndexMemory);
        }
        if !self.is_within_share(put, *promised + units) {
            return Err(Refusal::NoSpace);
        }
        self.make_quota_space(put.scope.slot, units, until.space)?;
        *promised += units;
        let (header_units, page_units) = put.run_lengths(pages.clone());
        let count = pages.len() as u32;
        let extents = self.find_space(header_units, page_units, count, until)?;
        let generation = self.shape.unique_number();
        Ok(PlannedRun {
            place: Place { generation, header_checksum: 0, header_units, page_units, extents },
            at: pages.start as u32,
            pages: count,
            parent: put.before(pages.start).filter(|_| put.scope.chained),
            parent_present: pages.start > 0 || put.parent_present,
        })
    }

    /// Returns whether the client of a put may reserve `units` for it. The owner's own puts are not
    /// limited.
    fn is_within_share(&self, put: &PutBatch<'_>, units: u64) -> bool {
        let budget = self.shape.budget();
        let total = u64::from(budget.segments_max) * budget.segment_bytes / UNIT;
        let (client, pages) = (put.client, put.hashes.len());
        client == ClientId::LOCAL
            || self.state.lock().reservations.allow(client, units, total, pages)
    }

    /// Ends a put of which no run was placed. Retains the stored pages of the put before it ends
    /// the put's lease, so that no eviction comes between.
    fn end_unplaced(&self, put: &PutBatch<'_>, lease: LeaseNumber, promised: u64) -> Result<()> {
        self.retain(put.scope.slot, &put.hashes, put.request.retain_until);
        let mut state = self.state.lock();
        state.residents.usage.release_promise(put.scope.slot, promised);
        state.release_lease(lease.0);
        drop(state);
        self.lifecycle.check_open()?;
        self.await_durable_put(put.request.flushed_later)
    }

    /// Logs the reservation `id` if its client is not the owner's process, and adds it to the open
    /// reservations.
    fn open_reservation(
        &self,
        id: u64,
        PutBatch { client, scope, request, hashes, .. }: PutBatch<'_>,
        lease: LeaseNumber,
        PlacedRuns { runs, promised, .. }: PlacedRuns,
    ) -> Result<()> {
        let logged = self.log_reservation(client, id, &runs);
        let mut state = self.state.lock();
        state.residents.usage.release_promise(scope.slot, promised);
        // Checked under the lock: a concurrent close would otherwise find no open reservation, and
        // record a clean close, just before this reservation is added.
        if let Err(error) = logged.and_then(|()| self.lifecycle.check_open()) {
            state.release_lease(lease.0);
            runs.iter().for_each(|run| state.space.free(&run.place.extents));
            return Err(error);
        }
        let ReserveRequest { retain_until, flushed_later, .. } = *request;
        let reservation = Reservation {
            client,
            scope,
            hashes,
            runs,
            retain_until,
            flushed_later,
            lease,
            failed_volumes: Vec::new(),
        };
        state.reservations.insert(id, reservation);
        Ok(())
    }

    /// Logs a reservation before the client receives its space: see [`super::reservations`].
    fn log_reservation(&self, client: ClientId, id: u64, runs: &[PlannedRun]) -> Result<()> {
        if client == ClientId::LOCAL {
            return Ok(());
        }
        let name = self.state.lock().reservations.client_name(client);
        self.reservation_log.lock().reserved(id, &name, runs)
    }
}

impl<'a> PutBatch<'a> {
    /// Hashes the keys of a put.
    ///
    /// # Errors
    /// `Invalid` for keys of a wrong length, too many keys, duplicates, or impossible page lengths
    /// or slices.
    fn checked(
        client: ClientId,
        scope: ScopeRef,
        keys: &'a [&'a [u8]],
        parent: Option<&[u8]>,
        request: &'a ReserveRequest,
    ) -> Result<Self> {
        check_keys(keys)?;
        if keys.len() > PUT_PAGES_MAX {
            return Err(Error::invalid(format!(
                "a put takes at most {PUT_PAGES_MAX} pages: split it"
            ))
            .with("pages", keys.len()));
        }
        let hashes: Vec<PageHash> = keys.iter().map(|key| PageHash::of(&scope.id, key)).collect();
        let mut sorted = hashes.clone();
        sorted.sort_unstable();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            let twice: Vec<usize> = (0..hashes.len()).filter(|&at| hashes[at] == pair[0]).collect();
            return Err(Error::invalid("a key comes twice in one batch: pass each page once")
                .with("positions", format!("{twice:?}")));
        }
        check_lengths(scope, keys.len(), request)?;
        let parent = parent.map(|key| check_keys(&[key]).map(|()| PageHash::of(&scope.id, key)));
        let (parent, present) = (parent.transpose()?, Vec::new());
        Ok(Self { client, scope, request, keys, hashes, parent, parent_present: false, present })
    }

    /// The page before page `at`, if known.
    fn before(&self, at: usize) -> Option<PageHash> {
        at.checked_sub(1).map(|before| self.hashes[before]).or(self.parent)
    }

    /// Units of the missing pages before page `end`.
    fn missing_units(&self, end: usize) -> u64 {
        let missing = (0..end).filter(|at| !self.present[*at]);
        missing.map(|page| u64::from(length_of(self.scope, self.request, page))).sum()
    }

    /// Returns the next missing pages of `from..end` that make up a run. The run's header has room
    /// for their keys and slices, the payload has at most `most` units (a longer page is a run
    /// alone), and padding is small where pages differ in length on disk.
    fn next_run(&self, from: usize, end: usize, most: u64) -> Option<Range<usize>> {
        let at = (from..end).find(|&at| !self.present[at])?;
        let gap = self.present[at..end].iter().take_while(|present| !**present).count();
        let lengths = self.keys[at..at + gap].iter().map(|key| key.len());
        let fit = RunHeader::pages_that_fit(lengths, self.request.slices_per_page.max(1)).max(1);
        Some(at..at + pages_alike(self.scope, self.request, at..at + gap.min(fit), most))
    }

    /// Units of the header and of each page of a run.
    fn run_lengths(&self, pages: Range<usize>) -> (u32, u32) {
        let lengths = self.keys[pages.clone()].iter().map(|key| key.len());
        let header_units = RunHeader::units(lengths, self.request.slices_per_page.max(1));
        let longest = pages.map(|page| length_of(self.scope, self.request, page)).max();
        (header_units, longest.unwrap_or(1))
    }
}

/// Checks the page lengths and slices of a request.
///
/// # Errors
/// `Invalid` for impossible lengths, or more slices than a header holds.
fn check_lengths(scope: ScopeRef, pages: usize, request: &ReserveRequest) -> Result<()> {
    let lengths = &request.page_units;
    let raw = units_of(scope.page_bytes);
    let fits = |units: &u32| (1..=raw).contains(&u64::from(*units));
    if (lengths.is_empty() || lengths.len() == pages) && lengths.iter().all(fits) {
        let slices = request.slices_per_page.max(1);
        if RunHeader::pages_that_fit([KEY_BYTES_MAX], slices) > 0 {
            return Ok(());
        }
    }
    Err(Error::invalid(
        "the page lengths or slices of this put are impossible: pass one length for each page, \
         from 1 unit to the unencoded length, and no more slices than a run header holds",
    )
    .with("pages", pages)
    .with("lengths", lengths.len())
    .with("slices", request.slices_per_page))
}

/// Maximum payload of a run of a put of `bytes` to a store on `volumes` volumes.
fn stripe_bytes(bytes: u64, volumes: u64) -> u64 {
    match volumes {
        0 | 1 => RUN_BYTES_MAX,
        volumes => bytes.div_ceil(volumes).clamp(STRIPE_BYTES_MIN, STRIPE_BYTES_MAX),
    }
}

/// Units of page `page` on disk.
fn length_of(scope: ScopeRef, request: &ReserveRequest, page: usize) -> u32 {
    let raw = units_of(scope.page_bytes) as u32;
    request.page_units.get(page).copied().unwrap_or(raw)
}

/// Returns how many of the leading `pages` share a run of at most `most` units: either pages that
/// take as many units as unencoded pages, or shorter pages of similar length. At least one, even if
/// it is longer than `most`.
fn pages_alike(scope: ScopeRef, request: &ReserveRequest, pages: Range<usize>, most: u64) -> usize {
    let raw = units_of(scope.page_bytes);
    let (mut longest, mut sum, mut count) = (0, 0, 0);
    for page in pages {
        let units = u64::from(length_of(scope, request, page));
        let padded = longest.max(units) * (count + 1);
        let padding = padded - sum - units;
        let is_alike = (longest == raw) == (units == raw)
            && padding <= (padded / PADDING_SHARE).max(PADDING_UNITS);
        if count > 0 && (padded > most || !is_alike) {
            break;
        }
        longest = longest.max(units);
        sum += units;
        count += 1;
    }
    count as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_format::{ScopeId, ScopeSlot};

    const SCOPE: ScopeRef = ScopeRef {
        id: ScopeId([1; 16]),
        slot: ScopeSlot(1),
        page_bytes: 100 * UNIT,
        chained: true,
        codec: 1,
    };

    fn alike(lengths: &[u32], most: u64) -> usize {
        let request = ReserveRequest { page_units: lengths.to_vec(), ..ReserveRequest::default() };
        assert!(check_lengths(SCOPE, lengths.len(), &request).is_ok());
        assert!(check_lengths(SCOPE, lengths.len() + 1, &request).is_err());
        pages_alike(SCOPE, &request, 0..lengths.len(), most)
    }

    #[test]
    fn pages_of_similar_length_share_a_run() {
        assert_eq!(alike(&[75, 74, 76, 75], 1000), 4);
        assert_eq!(alike(&[75, 74, 76, 75], 230), 3, "a run has at most the maximum length");
        assert_eq!(alike(&[75, 10, 10], 1000), 1, "padding costs more than another run");
        assert_eq!(alike(&[10, 75], 1000), 1);
        assert_eq!(alike(&[2, 1, 2, 1, 2, 1], 1000), 6, "another run costs more than padding");
        assert_eq!(alike(&[5], 1), 1, "a run has at least one page");
    }

    #[test]
    fn stripe_length_depends_on_bytes_and_volumes() {
        const MIB: u64 = 1 << 20;
        assert_eq!(stripe_bytes(1 << 40, 1), RUN_BYTES_MAX);
        assert_eq!(stripe_bytes(256 * MIB, 4), 16 * MIB);
        assert_eq!(stripe_bytes(32 * MIB, 4), 8 * MIB);
        assert_eq!(stripe_bytes(MIB, 4), 4 * MIB, "a short put is one run");
    }

    #[test]
    fn raw_and_encoded_pages_share_no_run() {
        assert_eq!(alike(&[100, 100, 99], 1000), 2);
        assert_eq!(alike(&[99, 100], 1000), 1);
    }

    #[test]
    fn impossible_lengths_are_refused() {
        for (page_units, slices_per_page) in [(vec![0], 1), (vec![101], 1), (vec![50], 2000)] {
            let request =
                ReserveRequest { page_units, slices_per_page, ..ReserveRequest::default() };
            assert!(check_lengths(SCOPE, 1, &request).is_err());
        }
    }
}

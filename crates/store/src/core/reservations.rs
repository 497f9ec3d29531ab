//! Reservations: the space of puts in progress.
//!
//! A client's reservation is logged before its extents are granted. A new owner must not reuse the
//! space before the reservation is aborted, or the client's process is proven dead and the segment
//! is drained, because writes of a dead client may still be in flight. The log needs no sync,
//! because a power loss ends the clients too.

use super::StoreCore;
use super::miss_causes::MissCause;
use crate::catalog::{LeaseNumber, ScopeRef};
use crate::client_id::ClientId;
use crate::directory::Directory;
use ritornello_format::{
    Error, Extent, PageHash, Place, ReservationRecord, Result, ScopeSlot, SegmentId,
};
use ritornello_medium::MediumFile;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// The log is rewritten when it is longer than this number of bytes plus a multiple of what it must
/// contain: see [`ReservationLog::shorten`].
const LOG_BYTES_MAX: u64 = 64 << 10;

/// Maximum memory of all open reservations of clients, in hashes of 16 bytes: 64 MiB.
const HASHES_MAX: u64 = 1 << 22;
/// The memory that a reservation takes besides its hashes, in hashes.
const RESERVATION_HASHES: u64 = 64;

/// Client of the reservation that stands for all reservations of a log that the disk cannot read.
/// No lock file has this name.
pub(crate) const UNKNOWN_CLIENT: &str = "?";

/// A put in progress.
#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) client: ClientId,
    pub(crate) scope: ScopeRef,
    pub(crate) hashes: Vec<PageHash>,
    pub(crate) runs: Vec<PlannedRun>,
    /// Seconds since 1970 until which the pages are retained, or zero.
    pub(crate) retain_until: u64,
    /// Whether the caller flushes after all parts of the put are committed.
    pub(crate) flushed_later: bool,
    /// Lease on the runs that this put follows.
    pub(crate) lease: LeaseNumber,
    /// Volumes on which writes of this put failed.
    pub(crate) failed_volumes: Vec<u8>,
}

impl Reservation {
    fn units(&self) -> u64 {
        self.runs.iter().map(|run| run.place.units()).sum()
    }

    /// The memory of the reservation, in hashes.
    fn memory(&self) -> u64 {
        memory_of(self.hashes.len())
    }

    /// The pages that get space, in order.
    pub(super) fn pages(&self) -> impl Iterator<Item = PageHash> {
        let of_run = |run: &PlannedRun| {
            let pages = run.at as usize..(run.at + run.pages) as usize;
            self.hashes.get(pages).unwrap_or_default()
        };
        self.runs.iter().flat_map(of_run).copied()
    }

    fn into_extents(self) -> Vec<Extent> {
        self.runs.into_iter().flat_map(|run| run.place.extents).collect()
    }
}

/// The memory of a reservation for a put of `pages` pages, in hashes.
fn memory_of(pages: usize) -> u64 {
    pages as u64 + RESERVATION_HASHES
}

/// The sums of the open reservations of one client.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    units: u64,
    /// Memory in hashes.
    memory: u64,
}

/// A run of a reservation: `pages` consecutive pages of the put, from the page with index `at`.
#[derive(Debug)]
pub(crate) struct PlannedRun {
    pub(crate) place: Place,
    pub(crate) at: u32,
    pub(crate) pages: u32,
    /// The page before the run's first page, if known.
    pub(crate) parent: Option<PageHash>,
    /// Whether the parent existed, or was part of the same put, when the run was planned. If false,
    /// the run may be committed before its parent.
    pub(crate) parent_present: bool,
}

/// A reservation that was open when its client disconnected or its owner ended. Its extents are
/// withheld until the client's process is proven dead, or a client with its name, or the owner's
/// process, aborts it. [`ReservationLog`] uses this type for every client's reservation that has
/// not ended.
#[derive(Clone, Debug)]
pub(crate) struct Withheld {
    pub(crate) client: String,
    pub(crate) extents: Vec<Extent>,
    /// Extents in absent segments, which the allocator does not know until they return.
    pub(crate) absent: Vec<Extent>,
}

impl Withheld {
    /// Reservations of an unreadable log: any client may write to any of the free `extents`.
    pub(crate) fn unknown(extents: Vec<Extent>) -> Self {
        Self { client: UNKNOWN_CLIENT.to_owned(), extents, absent: Vec::new() }
    }
}

/// The open reservations, the connected clients, and the reservations that are withheld for
/// disconnected clients and for clients of former owners.
#[derive(Debug)]
pub(crate) struct Reservations {
    open: HashMap<u64, Reservation>,
    /// The sums of `open` by client.
    held: HashMap<ClientId, Held>,
    withheld: HashMap<u64, Withheld>,
    /// The lock file's name of each connected client; empty for the owner's process.
    clients: HashMap<ClientId, String>,
    /// Pages of puts in progress that no open reservation lists: the put waits for space, or its
    /// commit waits for a sync.
    pending: BTreeMap<u64, (ScopeSlot, Arc<[PageHash]>)>,
}

/// Pages of a put that waits for space, which are pending until this value is dropped. Dropping it
/// takes the core state's lock.
pub(super) struct PendingPages<'a> {
    core: &'a StoreCore,
    number: u64,
}

impl Drop for PendingPages<'_> {
    fn drop(&mut self) {
        self.core.state.lock().reservations.end_pending(self.number);
    }
}

impl Reservations {
    /// Creates the table without open reservations; only the owner's process is connected.
    pub(super) fn new(withheld: HashMap<u64, Withheld>) -> Self {
        let clients = HashMap::from([(ClientId::LOCAL, String::new())]);
        let (open, held) = (HashMap::new(), HashMap::new());
        Self { open, held, withheld, clients, pending: BTreeMap::new() }
    }

    pub(super) fn connect(&mut self, client: ClientId, name: &str) {
        self.clients.insert(client, name.to_owned());
    }

    /// Removes a client. The client's reservations are withheld until the process is proven dead,
    /// or a client with its name, or the owner's process, aborts them. Returns the pages that these
    /// reservations were for.
    pub(super) fn disconnect(&mut self, client: ClientId) -> Vec<PageHash> {
        let name = self.clients.remove(&client).unwrap_or_default();
        self.held.remove(&client);
        let mut pages = Vec::new();
        for (id, reservation) in self.open.extract_if(|_, open| open.client == client) {
            pages.extend(reservation.pages());
            let withheld = Withheld {
                client: name.clone(),
                extents: reservation.into_extents(),
                absent: Vec::new(),
            };
            self.withheld.insert(id, withheld);
        }
        pages
    }

    /// The open reservations by number.
    pub(super) fn open(&self) -> &HashMap<u64, Reservation> {
        &self.open
    }

    /// Adds pages of a put in progress that no open reservation lists. Returns the number with
    /// which [`Self::end_pending`] removes them.
    pub(super) fn add_pending(&mut self, slot: ScopeSlot, pages: &[PageHash]) -> u64 {
        let number = self.pending.last_key_value().map_or(0, |(last, _)| last + 1);
        self.pending.insert(number, (slot, pages.into()));
        number
    }

    pub(super) fn end_pending(&mut self, number: u64) {
        self.pending.remove(&number);
    }

    /// The pages of a scope that are pending: see [`Self::add_pending`].
    pub(super) fn pending(&self, slot: ScopeSlot) -> impl Iterator<Item = Arc<[PageHash]>> {
        let of_scope = move |(of, pages): &(ScopeSlot, Arc<[PageHash]>)| {
            (*of == slot).then(|| Arc::clone(pages))
        };
        self.pending.values().filter_map(of_scope)
    }

    pub(super) fn client_name(&self, client: ClientId) -> String {
        self.clients.get(&client).cloned().unwrap_or_default()
    }

    pub(super) fn clients(&self) -> usize {
        self.clients.keys().filter(|client| **client != ClientId::LOCAL).count()
    }

    pub(super) fn insert(&mut self, id: u64, reservation: Reservation) {
        let held = self.held.entry(reservation.client).or_default();
        held.units += reservation.units();
        held.memory += reservation.memory();
        self.open.insert(id, reservation);
    }

    fn remove(&mut self, id: u64) -> Option<Reservation> {
        let reservation = self.open.remove(&id)?;
        if let Some(held) = self.held.get_mut(&reservation.client) {
            held.units = held.units.saturating_sub(reservation.units());
            held.memory = held.memory.saturating_sub(reservation.memory());
        }
        Some(reservation)
    }

    /// Takes an open reservation to commit it.
    ///
    /// # Errors
    /// `Invalid` if the reservation is another client's; `Retry` if it is not open.
    pub(super) fn take(&mut self, client: ClientId, id: u64) -> Result<Reservation> {
        self.check_client(client, id)?;
        self.remove(id).ok_or_else(|| {
            Error::retry("the owner does not know this reservation: put the pages again")
                .with("reservation", id)
        })
    }

    /// Records volumes on which writes of an open reservation of `client` failed.
    fn note_failed(&mut self, client: ClientId, id: u64, volumes: &[u8]) {
        let own = self.open.get_mut(&id).filter(|reservation| reservation.client == client);
        if let Some(reservation) = own {
            reservation.failed_volumes = volumes.to_vec();
        }
    }

    /// Refuses a commit or abort of another client's reservation. A withheld reservation may be
    /// aborted by a client with the name under which it was made, and by the owner's process, which
    /// may have been a client when it made the reservation.
    pub(super) fn check_client(&self, client: ClientId, id: u64) -> Result<()> {
        let theirs = match self.open.get(&id) {
            Some(reservation) => reservation.client == client,
            None => self.withheld.get(&id).is_none_or(|withheld| {
                let name = self.clients.get(&client);
                client == ClientId::LOCAL || name == Some(&withheld.client)
            }),
        };
        if theirs {
            return Ok(());
        }
        Err(Error::invalid("this reservation is another client's: commit or abort your own")
            .with("reservation", id))
    }

    /// Returns whether `client` may reserve `more` of `total` units for a put of `pages` pages. The
    /// client's reservations may take at most the units that then remain unreserved, because other
    /// clients cannot use space that a hung process has reserved, and at most the part of
    /// [`HASHES_MAX`] that then remains: the space bounds their number, and not their memory.
    pub(super) fn allow(&self, client: ClientId, more: u64, total: u64, pages: usize) -> bool {
        let own = self.held.get(&client).copied().unwrap_or_default();
        let memory = memory_of(pages);
        let of_clients = self.held.iter().filter(|(holder, _)| **holder != ClientId::LOCAL);
        let all: u64 = of_clients.map(|(_, held)| held.memory).sum();
        own.units + more <= total.saturating_sub(self.units() + more)
            && own.memory + memory <= HASHES_MAX.saturating_sub(all + memory)
    }

    /// Units reserved and withheld, without withheld extents in absent segments.
    pub(super) fn units(&self) -> u64 {
        let open = self.held.values().map(|held| held.units);
        let withheld = self.withheld.values().flat_map(|w| &w.extents).map(|e| u64::from(e.units));
        open.sum::<u64>() + withheld.sum::<u64>()
    }

    /// Units of open reservations in a scope.
    pub(super) fn units_of_scope(&self, slot: ScopeSlot) -> u64 {
        let open = self.open.values().filter(|open| open.scope.slot == slot);
        open.map(Reservation::units).sum()
    }

    /// Number of open reservations.
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    pub(super) fn has_open_of(&self, client: ClientId) -> bool {
        self.open.values().any(|open| open.client == client)
    }

    /// The scopes of open reservations.
    pub(super) fn scopes(&self) -> HashSet<ScopeSlot> {
        self.open.values().map(|open| open.scope.slot).collect()
    }

    /// The withheld reservations, and the names of their clients.
    pub(super) fn withheld_clients(&self) -> Vec<(u64, String)> {
        self.withheld.iter().map(|(id, withheld)| (*id, withheld.client.clone())).collect()
    }

    /// Moves the withheld extents of the returned segment `id` from [`Withheld::absent`] to
    /// [`Withheld::extents`]. `mark` marks an extent as in use; drops the extents for which it
    /// returns false.
    pub(super) fn restore_segment(&mut self, id: SegmentId, mut mark: impl FnMut(&Extent) -> bool) {
        for withheld in self.withheld.values_mut() {
            let (back, absent): (Vec<_>, Vec<_>) =
                std::mem::take(&mut withheld.absent).into_iter().partition(|e| e.segment == id);
            withheld.absent = absent;
            withheld.extents.extend(back.into_iter().filter(&mut mark));
        }
    }
}

impl StoreCore {
    /// Makes the pages of a put pending until the returned value is dropped.
    pub(super) fn note_pending(&self, slot: ScopeSlot, pages: &[PageHash]) -> PendingPages<'_> {
        let number = self.state.lock().reservations.add_pending(slot, pages);
        PendingPages { core: self, number }
    }

    /// Records that writes of a put failed on `volumes`. The commit of the put uses this record.
    /// Ignores unknown reservations.
    pub(super) fn report_failed_writes(&self, client: ClientId, id: u64, volumes: &[u8]) {
        self.state.lock().reservations.note_failed(client, id, volumes);
    }

    /// Frees the space of a reservation that its client aborts. The client must have no write to
    /// this space in flight.
    ///
    /// # Errors
    /// `Invalid` if the reservation is another client's.
    pub(super) fn abort(&self, client: ClientId, id: u64) -> Result<()> {
        self.state.lock().reservations.check_client(client, id)?;
        self.abandon(id, Abandoned::ByCall);
        Ok(())
    }

    /// Frees the space of a reservation that will not be written: immediately, or after a drain if
    /// the client died.
    pub(super) fn abandon(&self, id: u64, by: Abandoned) {
        let mut state = self.state.lock();
        let (extents, logged) = if let Some(withheld) = state.reservations.withheld.remove(&id) {
            drop(state);
            (withheld.extents, true)
        } else if let Some(reservation) = state.reservations.remove(id) {
            self.counters.runs_abandoned.add(reservation.runs.len() as u64);
            state.release_lease(reservation.lease.0);
            // Recorded under the lock: an explanation that finds no reservation finds the cause.
            self.miss_causes.note(reservation.pages(), MissCause::Abandoned);
            drop(state);
            let logged = reservation.client != ClientId::LOCAL;
            (reservation.into_extents(), logged)
        } else {
            return;
        };
        // Log the end of the reservation before its space is freed. If the space were freed first,
        // a crash could leave a log that withholds space which another put has received.
        if logged {
            self.reservation_log.lock().note_ended(id);
        }
        let space = &mut self.state.lock().space;
        match by {
            // No run of the reservation was committed, so no journal record names this space, and
            // it can be reused without a sync.
            Abandoned::ByCall => space.free(&extents),
            Abandoned::ByDeath => space.withhold(extents),
        }
    }
}

/// How a reservation was abandoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Abandoned {
    /// The writer aborted the reservation, and has no write in flight.
    ByCall,
    /// The writer died; its last writes may be in flight.
    ByDeath,
}

#[derive(Debug)]
pub(crate) struct ReservationLog {
    directory: Directory,
    file: Arc<dyn MediumFile>,
    length: u64,
    /// The length after the last rewriting.
    rewritten: u64,
    outstanding: HashMap<u64, Withheld>,
    /// Whether the log still names the space of an ended reservation, because the record of its end
    /// could not be written.
    lacks_an_end: bool,
}

impl ReservationLog {
    /// Starts a new log with the reservations in `outstanding`.
    pub(crate) fn restart(
        directory: Directory,
        outstanding: HashMap<u64, Withheld>,
    ) -> Result<Self> {
        let records: Vec<ReservationRecord> = outstanding
            .iter()
            .map(|(id, withheld)| {
                let client = withheld.client.clone();
                let extents = [withheld.extents.as_slice(), &withheld.absent].concat();
                ReservationRecord::Reserved { id: *id, client, extents }
            })
            .collect();
        let log = ReservationRecord::encode_log(&records);
        let file = directory.replace_reservation_log(&log)?;
        let length = log.len() as u64;
        let rewritten = length;
        Ok(Self { directory, file, length, rewritten, outstanding, lacks_an_end: false })
    }

    /// Rewrites the log with all outstanding reservations.
    pub(crate) fn rewrite(&mut self) -> Result<()> {
        *self = Self::restart(self.directory.clone(), self.outstanding.clone())?;
        Ok(())
    }

    /// Logs a reservation, so that the next owner withholds its space after a crash. If the log
    /// lacks the record of an ended reservation's end, the log is rewritten first: otherwise it
    /// could name the same space twice.
    ///
    /// # Errors
    /// Errors of the file system: the reservation must not be granted.
    pub(crate) fn reserved(&mut self, id: u64, client: &str, runs: &[PlannedRun]) -> Result<()> {
        if self.lacks_an_end {
            self.rewrite()?;
        }
        let extents: Vec<Extent> =
            runs.iter().flat_map(|run| run.place.extents.iter().copied()).collect();
        let client = client.to_owned();
        let record =
            ReservationRecord::Reserved { id, client: client.clone(), extents: extents.clone() };
        self.append(&record)?;
        self.outstanding.insert(id, Withheld { client, extents, absent: Vec::new() });
        Ok(())
    }

    /// Logs the end of a reservation. An error is only logged: no other client receives the space
    /// before [`ReservationLog::reserved`] has rewritten the log.
    pub(crate) fn note_ended(&mut self, id: u64) {
        if self.outstanding.remove(&id).is_none() {
            return;
        }
        let ended = self.append(&ReservationRecord::Ended { id });
        self.lacks_an_end |= ended.is_err();
        if let Err(error) = ended.and_then(|()| self.shorten()) {
            tracing::warn!(%error, "the reservation log could not be written");
        }
    }

    /// Rewrites the log if it is longer than [`LOG_BYTES_MAX`] plus 1 KiB for each outstanding
    /// reservation, and twice as long as after the last rewriting. The records of a reservation
    /// usually take about a hundred bytes, so a log of this length consists mostly of records of
    /// ended reservations.
    fn shorten(&mut self) -> Result<()> {
        let live = 512 * self.outstanding.len() as u64;
        if self.length > LOG_BYTES_MAX + 2 * live.max(self.rewritten) {
            self.rewrite()?;
        }
        Ok(())
    }

    fn append(&mut self, record: &ReservationRecord) -> Result<()> {
        let bytes = record.encode();
        self.file.write_at(&bytes, self.length)?;
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Returns the reservations that `log` leaves outstanding.
    ///
    /// # Errors
    /// `Invalid` if the format version differs.
    pub(crate) fn outstanding(log: &[u8]) -> Result<HashMap<u64, Withheld>> {
        let mut open = HashMap::new();
        for record in ReservationRecord::decode_log(log)? {
            match record {
                ReservationRecord::Reserved { id, client, extents } => {
                    open.insert(id, Withheld { client, extents, absent: Vec::new() });
                }
                ReservationRecord::Ended { id } => {
                    open.remove(&id);
                }
            }
        }
        Ok(open)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_format::ScopeId;
    use ritornello_medium::{Faulty, MediumFault, Op, Rule, Schedule, SimDisk};
    use std::path::Path;

    fn reservation(client: u64, units: u32) -> Reservation {
        let extents = vec![Extent { segment: SegmentId::new(0, 0), start: 0, units }];
        let place = Place { extents, ..Place::default() };
        let run = PlannedRun { place, at: 0, pages: 1, parent: None, parent_present: false };
        let (id, slot) = (ScopeId([0; 16]), ScopeSlot(0));
        Reservation {
            client: ClientId(client),
            scope: ScopeRef { id, slot, page_bytes: 1, chained: true, codec: 0 },
            hashes: Vec::new(),
            runs: vec![run],
            retain_until: 0,
            flushed_later: false,
            lease: LeaseNumber::default(),
            failed_volumes: Vec::new(),
        }
    }

    #[test]
    fn client_reserves_at_most_half_of_the_unreserved_space() {
        let mut all = Reservations::new(HashMap::new());
        let (one, two) = (ClientId(1), ClientId(2));
        assert!(all.allow(one, 50, 100, 1) && !all.allow(one, 51, 100, 1));
        all.insert(1, reservation(1, 30));
        all.insert(2, reservation(1, 20));
        assert!(!all.allow(one, 1, 100, 1));
        assert!(all.allow(two, 25, 100, 1) && !all.allow(two, 26, 100, 1));
        let extents = vec![Extent { segment: SegmentId::new(0, 1), start: 0, units: 40 }];
        let absent = Vec::new();
        all.withheld.insert(3, Withheld { client: "gone".to_owned(), extents, absent });
        assert!(all.allow(two, 5, 100, 1) && !all.allow(two, 6, 100, 1));
    }

    #[test]
    fn client_uses_at_most_half_of_the_unused_memory() {
        let mut all = Reservations::new(HashMap::new());
        let (one, two) = (ClientId(1), ClientId(2));
        all.connect(one, "one");
        let hashes = vec![PageHash::NONE; 65_535];
        let mut open = 0;
        while all.allow(one, 1, u64::MAX, hashes.len()) {
            all.insert(open, Reservation { hashes: hashes.clone(), ..reservation(1, 1) });
            open += 1;
        }
        assert_eq!(open, HASHES_MAX / 2 / memory_of(hashes.len()));
        assert!(all.allow(two, 1, u64::MAX, hashes.len()), "another client may reserve");
        assert!(all.take(one, 0).is_ok() && all.allow(one, 1, u64::MAX, hashes.len()));
        all.disconnect(one);
        assert!(all.held.is_empty() && all.units() == open - 1);
    }

    #[test]
    fn client_of_the_same_name_may_abort_a_withheld_reservation() {
        let mut all = Reservations::new(HashMap::new());
        let (gone, other, back) = (ClientId(1), ClientId(2), ClientId(3));
        all.connect(gone, "a");
        all.connect(other, "b");
        all.insert(7, reservation(1, 30));
        assert!(all.check_client(other, 7).is_err() && all.take(other, 7).is_err());
        all.disconnect(gone);
        assert_eq!((all.len(), all.units(), all.clients()), (0, 30, 1));
        assert_eq!(all.withheld_clients(), [(7, "a".to_owned())]);
        all.connect(back, "a");
        assert!(all.check_client(back, 7).is_ok() && all.check_client(ClientId::LOCAL, 7).is_ok());
        assert!(all.check_client(other, 7).is_err());
        assert!(all.take(back, 7).is_err(), "a withheld reservation cannot be committed");
    }

    #[test]
    fn log_that_lacks_a_reservations_end_is_rewritten_before_the_next() {
        let schedule = Schedule::new();
        let medium = Faulty::new(Arc::new(SimDisk::new(1 << 24)), schedule.clone());
        let directory = Directory::new(Arc::new(medium), Path::new("/"));
        let mut log = ReservationLog::restart(directory.clone(), HashMap::new()).unwrap();
        let runs = reservation(1, 10).runs;
        log.reserved(1, "a", &runs).unwrap();
        schedule.add(Rule::always(MediumFault::NoSpace).on(Op::Write));
        log.note_ended(1);
        assert!(log.reserved(2, "b", &runs).is_err());
        schedule.heal();
        log.reserved(2, "b", &runs).unwrap();
        let left =
            ReservationLog::outstanding(&directory.reservation_log().unwrap().unwrap()).unwrap();
        assert_eq!(left.into_keys().collect::<Vec<_>>(), [2]);
    }
}

//! Reservations: the space of puts in progress.
//!
//! A client's reservation is logged before its extents are granted: the I/O of a dead client may
//! still land, and a new owner must not reuse that space before the process is dead and the segment
//! is drained. The log needs no sync: a power loss ends the clients, too.

use super::{ClientId, StoreCore};
use crate::catalog::{LeaseNumber, ScopeRef};
use crate::directory::Directory;
use ritornello_format::{Extent, PageHash, Place, ReservationRecord, Result};
use ritornello_medium::MediumFile;
use std::collections::HashMap;
use std::sync::Arc;

/// The log is rewritten when it is longer than this and mostly consists of ended reservations.
const LOG_BYTES_MAX: u64 = 64 << 10;

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
}

/// A planned run with its space.
#[derive(Debug)]
pub(crate) struct PlannedRun {
    pub(crate) place: Place,
    pub(crate) at: u32,
    pub(crate) pages: u32,
    /// The page before the run's first page, if known.
    pub(crate) parent: Option<PageHash>,
    /// Whether the parent existed, or was part of the same put, when the run was planned. Otherwise
    /// the run may be committed before the parent.
    pub(crate) parent_present: bool,
}

/// Extents withheld until their writer is proven dead.
#[derive(Clone, Debug)]
pub(crate) struct Withheld {
    pub(crate) client: String,
    pub(crate) extents: Vec<Extent>,
    /// Extents in absent segments, which no allocator knows until they return.
    pub(crate) absent: Vec<Extent>,
}

/// Reservations in progress, and those withheld for former owners' clients.
#[derive(Debug)]
pub(crate) struct Reservations {
    pub(crate) open: HashMap<u64, Reservation>,
    pub(crate) withheld: HashMap<u64, Withheld>,
}

impl Reservations {
    /// Returns whether `client` may reserve `more` of `total` units: at most the units left for
    /// other clients, which cannot use the space of a hung process.
    pub(crate) fn allow(&self, client: ClientId, more: u64, total: u64) -> bool {
        let own = self.open.values().filter(|reservation| reservation.client == client);
        let own: u64 = own.flat_map(|r| &r.runs).map(|run| run.place.units()).sum();
        own + more <= total.saturating_sub(self.units() + more)
    }

    pub(crate) fn units(&self) -> u64 {
        let open = self.open.values().flat_map(|r| &r.runs).map(|run| run.place.units());
        let withheld = self.withheld.values().flat_map(|w| &w.extents).map(|e| u64::from(e.units));
        open.chain(withheld).sum()
    }
}

impl StoreCore {
    /// Frees the space of a reservation that will not be written: immediately, or after a drain if
    /// its client died.
    pub(super) fn abandon(&self, id: u64, by: Abandoned) {
        let (extents, logged) = {
            let mut state = self.state.lock();
            if let Some(withheld) = state.reservations.withheld.remove(&id) {
                (withheld.extents, true)
            } else if let Some(reservation) = state.reservations.open.remove(&id) {
                self.counters.runs_abandoned.add(reservation.runs.len() as u64);
                let freed = state.leases.release(reservation.lease.0);
                state.add_to_limbo(freed);
                let extents = reservation.runs.into_iter().flat_map(|run| run.place.extents);
                (extents.collect(), reservation.client != ClientId::LOCAL)
            } else {
                return;
            }
        };
        // The end is logged before the space is freed: a later record could withhold space that has
        // a new user.
        if logged {
            self.log.lock().note_ended(id);
        }
        let mut state = self.state.lock();
        match by {
            // No run and no journal record ever named this space, so it skips limbo.
            Abandoned::ByCall => self.free(&mut state, &extents),
            Abandoned::ByDeath => state.draining.add(extents),
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

/// The reservation log file.
#[derive(Debug)]
pub(crate) struct ReservationLog {
    directory: Directory,
    file: Arc<dyn MediumFile>,
    length: u64,
    outstanding: HashMap<u64, Withheld>,
}

impl ReservationLog {
    /// Starts a new log with the reservations in `outstanding`.
    pub(crate) fn restart(
        directory: Directory,
        outstanding: HashMap<u64, Withheld>,
    ) -> Result<Self> {
        let records: Vec<u8> = outstanding
            .iter()
            .flat_map(|(id, withheld)| {
                let client = withheld.client.clone();
                let extents = [withheld.extents.as_slice(), &withheld.absent].concat();
                ReservationRecord::Reserved { id: *id, client, extents }.encode()
            })
            .collect();
        let file = directory.replace_reservation_log(&records)?;
        Ok(Self { directory, file, length: records.len() as u64, outstanding })
    }

    /// Rewrites the log with all outstanding reservations.
    pub(crate) fn rewrite(&mut self) -> Result<()> {
        *self = Self::restart(self.directory.clone(), self.outstanding.clone())?;
        Ok(())
    }

    pub(crate) fn reserved(&mut self, id: u64, client: &str, runs: &[PlannedRun]) -> Result<()> {
        let extents: Vec<Extent> =
            runs.iter().flat_map(|run| run.place.extents.iter().copied()).collect();
        let client = client.to_owned();
        let record =
            ReservationRecord::Reserved { id, client: client.clone(), extents: extents.clone() };
        self.append(&record)?;
        self.outstanding.insert(id, Withheld { client, extents, absent: Vec::new() });
        Ok(())
    }

    /// Logs the end of a reservation. Best effort: a missing record only withholds the space for
    /// longer.
    pub(crate) fn note_ended(&mut self, id: u64) {
        if self.outstanding.remove(&id).is_none() {
            return;
        }
        let done = self.append(&ReservationRecord::Ended { id }).and_then(|()| self.shorten());
        if let Err(error) = done {
            tracing::warn!(%error, "the reservation log could not be written");
        }
    }

    /// Rewrites a log that is mostly history: both records of a reservation take about a hundred
    /// bytes.
    fn shorten(&mut self) -> Result<()> {
        let live = 512 * self.outstanding.len() as u64;
        if self.length > LOG_BYTES_MAX + 2 * live {
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
    pub(crate) fn outstanding(log: &[u8]) -> HashMap<u64, Withheld> {
        let mut open = HashMap::new();
        for record in ReservationRecord::decode_all(log) {
            match record {
                ReservationRecord::Reserved { id, client, extents } => {
                    open.insert(id, Withheld { client, extents, absent: Vec::new() });
                }
                ReservationRecord::Ended { id } => {
                    open.remove(&id);
                }
            }
        }
        open
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_format::{ScopeId, ScopeSlot, SegmentId};

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
        }
    }

    #[test]
    fn client_reserves_at_most_half() {
        let mut all = Reservations { open: HashMap::new(), withheld: HashMap::new() };
        let (one, two) = (ClientId(1), ClientId(2));
        assert!(all.allow(one, 50, 100) && !all.allow(one, 51, 100));
        all.open.insert(1, reservation(1, 30));
        all.open.insert(2, reservation(1, 20));
        assert!(!all.allow(one, 1, 100));
        assert!(all.allow(two, 25, 100) && !all.allow(two, 26, 100));
        let extents = vec![Extent { segment: SegmentId::new(0, 1), start: 0, units: 40 }];
        let absent = Vec::new();
        all.withheld.insert(3, Withheld { client: "gone".to_owned(), extents, absent });
        assert!(all.allow(two, 5, 100) && !all.allow(two, 6, 100));
    }
}

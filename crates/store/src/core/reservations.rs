//! Space that somebody is writing to.
//!
//! A reservation of another process is written to the log before its extents are handed out: the
//! I/O of a dead client may still land, and a new owner must not reuse that space before the process is
//! gone and the segment is drained. The log needs no sync: power loss ends the clients, too.

use crate::catalog::{LeaseNumber, ScopeRef};
use crate::core::ClientId;
use crate::directory::Directory;
use ritornello_format::{Extent, PageHash, Place, ReservationRecord, Result};
use ritornello_medium::MediumFile;
use std::collections::HashMap;
use std::sync::Arc;

/// The log is written anew when it is longer than this, and mostly of what is settled.
const LOG_BYTES_MAX: u64 = 64 << 10;

/// One put on its way.
#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) client: ClientId,
    pub(crate) scope: ScopeRef,
    pub(crate) hashes: Vec<PageHash>,
    pub(crate) runs: Vec<PlannedRun>,
    /// Seconds since 1970 until which the pages are to be kept, or zero.
    pub(crate) retain_until: u64,
    /// Whether the put is flushed when all of it is committed.
    pub(crate) flushed_later: bool,
    /// Pins the runs that this put hangs behind.
    pub(crate) lease: LeaseNumber,
}

/// A run with its space.
#[derive(Debug)]
pub(crate) struct PlannedRun {
    pub(crate) place: Place,
    pub(crate) at: u32,
    pub(crate) pages: u32,
    /// The page before its first one, if it is known.
    pub(crate) parent: Option<PageHash>,
    /// Whether that page was there, or on its way in the same put, when the run was planned: if
    /// not, the run may come before it.
    pub(crate) parent_there: bool,
}

/// Extents nobody may have until their writer is proven gone.
#[derive(Clone, Debug)]
pub(crate) struct Withheld {
    pub(crate) client: String,
    pub(crate) extents: Vec<Extent>,
    /// Extents in space that is absent: no allocator knows them before it is back.
    pub(crate) absent: Vec<Extent>,
}

/// Reservations in flight, and those of former owners' clients.
#[derive(Debug)]
pub(crate) struct Reservations {
    pub(crate) open: HashMap<u64, Reservation>,
    pub(crate) withheld: HashMap<u64, Withheld>,
}

impl Reservations {
    /// Whether `client` may have `more` of `total` units: nobody reserves more than is left for the
    /// others, because what a process that hangs has reserved, nobody else can have.
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

/// The log file.
#[derive(Debug)]
pub(crate) struct ReservationLog {
    directory: Directory,
    file: Arc<dyn MediumFile>,
    length: u64,
    outstanding: HashMap<u64, Withheld>,
}

impl ReservationLog {
    /// Starts a log anew with what is `outstanding`.
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

    /// Writes the log anew, with what is outstanding.
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

    /// Best effort: a record that is missing only withholds space for longer.
    pub(crate) fn note_ended(&mut self, id: u64) {
        if self.outstanding.remove(&id).is_none() {
            return;
        }
        let done = self.append(&ReservationRecord::Settled { id }).and_then(|()| self.shorten());
        if let Err(error) = done {
            tracing::warn!(%error, "the reservation log could not be written");
        }
    }

    /// A reserved and a settled record are about a hundred bytes, so a long log with few
    /// outstanding is mostly history.
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

    /// What `log` leaves outstanding.
    pub(crate) fn outstanding(log: &[u8]) -> HashMap<u64, Withheld> {
        let mut open = HashMap::new();
        for record in ReservationRecord::decode_all(log) {
            match record {
                ReservationRecord::Reserved { id, client, extents } => {
                    open.insert(id, Withheld { client, extents, absent: Vec::new() });
                }
                ReservationRecord::Settled { id } => {
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
        let run = PlannedRun { place, at: 0, pages: 1, parent: None, parent_there: false };
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
    fn nobody_reserves_more_than_is_left_for_the_others() {
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

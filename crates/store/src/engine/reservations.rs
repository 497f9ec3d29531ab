//! Space that somebody is writing to.
//!
//! A reservation of another process is written to the log before its extents are handed out: the
//! I/O of a dead client may still land, and a new owner must not give that space away before the
//! process is proven gone. The log needs no sync: power loss ends the clients, too.

use crate::catalog::{LeaseNumber, ScopeRef};
use crate::directory::Directory;
use crate::engine::ClientId;
use ritornello_format::{Extent, PageHash, Place, ReservationRecord, Result};
use ritornello_medium::MediumFile;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

/// The log is cut when it is longer than this and nothing is outstanding.
const LOG_BYTES_MAX: u64 = 64 << 10;

/// One put on its way.
#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) client: ClientId,
    pub(crate) scope: ScopeRef,
    pub(crate) hashes: Vec<PageHash>,
    pub(crate) runs: Vec<PlannedRun>,
    /// Pins the runs that this put hangs behind.
    pub(crate) lease: LeaseNumber,
}

/// A run with its space.
#[derive(Debug)]
pub(crate) struct PlannedRun {
    pub(crate) place: Place,
    pub(crate) at: u32,
    pub(crate) pages: u32,
    /// The page before its first one, if there was one when it was planned.
    pub(crate) parent: Option<PageHash>,
}

/// Extents nobody may have until their writer is proven gone.
#[derive(Debug)]
pub(crate) struct Withheld {
    pub(crate) client: String,
    pub(crate) extents: Vec<Extent>,
}

/// Reservations in flight, and those of former owners' clients.
#[derive(Debug)]
pub(crate) struct Reservations {
    pub(crate) open: HashMap<u64, Reservation>,
    pub(crate) withheld: HashMap<u64, Withheld>,
}

impl Reservations {
    pub(crate) fn units(&self) -> u64 {
        let open = self.open.values().flat_map(|r| &r.runs).map(|run| run.place.units());
        let withheld = self.withheld.values().flat_map(|w| &w.extents).map(|e| u64::from(e.units));
        open.chain(withheld).sum()
    }
}

/// The log file.
#[derive(Debug)]
pub(crate) struct ReservationLog {
    file: Arc<dyn MediumFile>,
    length: u64,
    outstanding: usize,
}

impl ReservationLog {
    /// Starts a log anew with what is `outstanding`.
    pub(crate) fn restart(
        directory: &Directory,
        outstanding: &HashMap<u64, Withheld>,
    ) -> Result<Self> {
        let records: Vec<u8> = outstanding
            .iter()
            .flat_map(|(id, withheld)| {
                let (client, extents) = (withheld.client.clone(), withheld.extents.clone());
                ReservationRecord::Reserved { id: *id, client, extents }.encode()
            })
            .collect();
        let file = directory.replace_reservation_log(&records)?;
        Ok(Self { file, length: records.len() as u64, outstanding: outstanding.len() })
    }

    pub(crate) fn reserved(
        &mut self,
        id: u64,
        client: &str,
        runs: &[PlannedRun],
    ) -> io::Result<()> {
        let extents = runs.iter().flat_map(|run| run.place.extents.iter().copied()).collect();
        self.append(&ReservationRecord::Reserved { id, client: client.to_owned(), extents })?;
        self.outstanding += 1;
        Ok(())
    }

    /// Best effort: a record that is missing only withholds space for longer.
    pub(crate) fn settled(&mut self, id: u64) {
        self.outstanding = self.outstanding.saturating_sub(1);
        let cut = self.outstanding == 0 && self.length > LOG_BYTES_MAX;
        let done = if cut {
            self.file.set_len(0).map(|()| self.length = 0)
        } else {
            self.append(&ReservationRecord::Settled { id })
        };
        if let Err(error) = done {
            tracing::warn!(%error, "the reservation log could not be written");
        }
    }

    fn append(&mut self, record: &ReservationRecord) -> io::Result<()> {
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
                    open.insert(id, Withheld { client, extents });
                }
                ReservationRecord::Settled { id } => {
                    open.remove(&id);
                }
            }
        }
        open
    }
}

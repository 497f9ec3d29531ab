//! A put in two halves, so that the second can happen within something else.

use crate::common::{Open, refs};
use crate::kinds::keys_of;
use ritornello_format::RunHeader;
use ritornello_store::{Catalog, ClientId, Reserved, ReservedRun, ScopeRef, Session, Wanted};
use ritornello_volume::memory::BorrowedPages;
use ritornello_volume::transfer::{Control, RunWrite};

/// Pages that are written and that nobody knows of.
pub struct Half {
    session: Session,
    reservation: u64,
    sums: Vec<Option<u64>>,
}

impl Half {
    /// Writes those of the first `count` pages of sequence `at` that are missing; `None` if there
    /// are none, or no room.
    pub fn write(open: &Open, at: usize, count: usize) -> Option<Self> {
        let (kind, keys) = keys_of(at);
        let keys = refs(&keys[..count]);
        let session = open.engine.session(ClientId::LOCAL, "");
        let scope = session.resolve(&kind.scope, true).unwrap().unwrap();
        let reserved = session.reserve(scope, &keys, None, &Wanted::default()).unwrap();
        if reserved.runs.is_empty() {
            return None;
        }
        let pages: Vec<Vec<u8>> = keys.iter().map(|key| kind.page(key)).collect();
        let pages: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
        let source = BorrowedPages::new(&pages);
        let headers: Vec<RunHeader> =
            reserved.runs.iter().map(|run| header(&reserved, run, scope, &keys)).collect();
        let writes: Vec<RunWrite<'_>> = reserved
            .runs
            .iter()
            .zip(&headers)
            .map(|(run, header)| RunWrite {
                place: &run.place,
                header,
                source: &source,
                first: run.at as usize,
            })
            .collect();
        let sums = open.engine.segments().write_runs(&writes, &Control::default());
        let sums = sums.into_iter().map(|sum| Some(sum.unwrap())).collect();
        Some(Self { session, reservation: reserved.id, sums })
    }

    pub fn commit(self) {
        self.session.commit(self.reservation, &self.sums).unwrap();
    }
}

fn header(reserved: &Reserved, run: &ReservedRun, scope: ScopeRef, keys: &[&[u8]]) -> RunHeader {
    let at = run.at as usize;
    let before = at.checked_sub(1).map(|before| keys[before]);
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
        keys: keys[at..at + run.pages as usize].iter().map(|key| key.to_vec()).collect(),
        slices_per_page: 1,
        slices: Vec::new(),
    }
}

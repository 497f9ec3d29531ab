//! A put in steps, so that other operations can happen between the steps.

use crate::common::refs;
use crate::kinds::keys_of;
use ritornello_format::{Result, RunHeader};
use ritornello_store::{Catalog, ReserveRequest, Reserved, ReservedRun, ScopeRef};
use ritornello_volume::page_memory::BorrowedPages;
use ritornello_volume::segments::Segments;
use ritornello_volume::transfer::{Control, RunWrite};
use std::sync::Arc;

/// A reservation of space, and the pages to write to it.
pub struct UnfinishedPut {
    catalog: Arc<dyn Catalog>,
    segments: Arc<Segments>,
    scope: ScopeRef,
    reserved: Reserved,
    at: usize,
    count: usize,
    sums: Vec<Option<u64>>,
    /// Whether the scope was dropped after the reservation: a commit stores no pages of it.
    pub void: bool,
    /// The owner epoch of the owner that reserved the space.
    pub epoch: u32,
}

impl UnfinishedPut {
    /// Reserves space for the missing pages among the first `count` pages of sequence `at`; `None`
    /// if no page is missing or no space is free.
    pub fn reserve(
        catalog: Arc<dyn Catalog>,
        segments: Arc<Segments>,
        at: usize,
        count: usize,
    ) -> Option<Self> {
        let (kind, keys) = keys_of(at);
        let keys = refs(&keys[..count]);
        let scope = catalog.resolve(&kind.scope, true).unwrap().unwrap();
        let reserved = catalog.reserve(scope, &keys, None, &ReserveRequest::default()).unwrap();
        let sums = vec![None; reserved.runs.len()];
        let (void, epoch) = (false, 0);
        let unfinished = Self { catalog, segments, scope, reserved, at, count, sums, void, epoch };
        (!unfinished.reserved.runs.is_empty()).then_some(unfinished)
    }

    pub fn pages(&self) -> (usize, usize) {
        (self.at, self.count)
    }

    /// Writes the runs. A run that cannot be written is left out of the commit.
    pub fn write(mut self) -> Self {
        let (kind, keys) = keys_of(self.at);
        let keys = refs(&keys[..self.count]);
        let pages: Vec<&[u8]> = keys.iter().map(|key| kind.page(key)).collect();
        let source = BorrowedPages::new(&pages);
        let reserved = &self.reserved;
        let headers: Vec<RunHeader> =
            reserved.runs.iter().map(|run| header(reserved, run, self.scope, &keys)).collect();
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
        let sums = self.segments.write_runs(&writes, &Control::default());
        self.sums = sums.into_iter().map(Result::ok).collect();
        self
    }

    /// Makes the written runs visible.
    ///
    /// # Errors
    /// `Retry` if the owner that reserved the space has ended.
    pub fn commit(&self) -> Result<()> {
        self.catalog.commit(self.reserved.id, &self.sums).map(drop)
    }

    pub fn abort(self) {
        self.catalog.abort(self.reserved.id).unwrap();
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
        keys: keys[at..at + run.pages as usize].iter().collect(),
        slices_per_page: 1,
        slices: Vec::new(),
    }
}

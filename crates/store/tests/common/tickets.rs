//! Gets and puts that a test does not wait for, on disks that may stall.

use super::*;
use ritornello_store::Ticket;
use ritornello_volume::page_memory::{OwnedPages, OwnedPagesMut};

fn boxed(keys: &[Vec<u8>]) -> Vec<Box<[u8]>> {
    keys.iter().map(|key| key.as_slice().into()).collect()
}

fn until(limit: Duration) -> Control {
    Control { deadline: Some(Instant::now() + limit), ..Control::default() }
}

/// Begins a get whose bytes are not checked.
pub fn start_get(open: &Open, scope: &Arc<Scope>, keys: &[Vec<u8>], limit: Duration) -> Ticket {
    let bytes = scope.resolved_page_bytes().unwrap() as usize;
    let target = Arc::new(OwnedPagesMut::new(vec![vec![0; bytes]; keys.len()]));
    open.store.submit_get(Arc::clone(scope), boxed(keys), target, until(limit)).unwrap()
}

pub fn start_put(open: &Open, scope: &Arc<Scope>, keys: &[Vec<u8>], limit: Duration) -> Ticket {
    let source = Arc::new(OwnedPages::new(keys.iter().map(|key| page(scope, key)).collect()));
    let (options, control) = (PutOptions::default(), until(limit));
    open.store.submit_put(Arc::clone(scope), boxed(keys), source, options, control).unwrap()
}

/// The number of leading pages and the reason of a call that must end within a minute, although a
/// disk stalls.
pub fn outcome(ticket: &Ticket) -> (usize, &'static str) {
    let outcome = ticket.wait(Some(Duration::from_secs(60)));
    let outcome = outcome.unwrap_or_else(|| panic!("the call waits for the stalled disk"));
    (outcome.pages, outcome.reason)
}

/// Waits until exactly `volumes` count as stalled.
pub fn await_stall(open: &Open, volumes: &[u8]) {
    let (until, segments) = (Instant::now() + Duration::from_secs(60), open.core.segments());
    while segments.stalled_volumes() != volumes {
        assert!(Instant::now() < until, "{:?} are stalled", segments.stalled_volumes());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The volumes that hold pieces of a stored page.
pub fn volumes_of(open: &Open, scope: &Scope, key: &[u8]) -> Vec<u8> {
    let catalog = open.core.catalog_for(ClientId::LOCAL, "");
    let reference = catalog.resolve(scope, false).unwrap().unwrap();
    let located = catalog.begin_read(reference, &[key]).unwrap();
    catalog.release(located.lease).unwrap();
    let extents = located.runs.iter().flat_map(|run| &run.place.extents);
    let mut volumes: Vec<u8> = extents.map(|extent| extent.segment.volume()).collect();
    volumes.sort_unstable();
    volumes.dedup();
    volumes
}

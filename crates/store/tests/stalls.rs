//! A disk that completes no operations delays only the calls that read or write pages on it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::Scope;
use ritornello_medium::{Faulty, Host, MediumFault, Op, Rule, Schedule};
use ritornello_store::{Catalog, ClientId, Options, Outcome, PutOptions, Ticket};
use ritornello_volume::page_memory::{OwnedPages, OwnedPagesMut};
use ritornello_volume::segments::IoChoice;
use ritornello_volume::transfer::Control;
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

const PAGE: u64 = 64 << 10;
/// Number of concurrent gets, puts or reads of a test: more than the threads that work on tickets
/// while no volume stalls, and more than the I/O threads of one volume.
const STALLED_GETS: usize = 24;
const SHORT: Duration = Duration::from_millis(1500);
const LONG: Duration = Duration::from_secs(60);

fn two_volumes(dir: &Path) -> (Schedule, Open) {
    let schedule = Schedule::new();
    let medium = Arc::new(Faulty::new(Arc::new(Host), schedule.clone()));
    let paths = ["disk0", "disk1"].map(|name| dir.join(name)).to_vec();
    let options = Options { paths, io: IoChoice::Pool, ..options(&dir.join("home"), 64) };
    let open = open_on(medium, &options).unwrap();
    (schedule, open)
}

/// The volume on which the stored page begins.
fn volume(open: &Open, scope: &Scope, key: &[u8]) -> u8 {
    let catalog = open.core.catalog_for(ClientId::LOCAL, "");
    let reference = catalog.resolve(scope, false).unwrap().unwrap();
    let located = catalog.begin_read(reference, &[key]).unwrap();
    catalog.release(located.lease).unwrap();
    located.runs[0].place.extents[0].segment.volume()
}

fn start_get(open: &Open, scope: &Arc<Scope>, key: &[u8], limit: Duration) -> Ticket {
    let target = Arc::new(OwnedPagesMut::new(vec![vec![0; PAGE as usize]]));
    let control = Control { deadline: Some(Instant::now() + limit), ..Control::default() };
    open.store.submit_get(Arc::clone(scope), vec![key.into()], target, control).unwrap()
}

fn start_put(open: &Open, scope: &Arc<Scope>, key: &[u8], limit: Duration) -> Ticket {
    let source = Arc::new(OwnedPages::new(vec![page(scope, key)]));
    let control = Control { deadline: Some(Instant::now() + limit), ..Control::default() };
    let (keys, options) = (vec![key.into()], PutOptions::default());
    open.store.submit_put(Arc::clone(scope), keys, source, options, control).unwrap()
}

#[test]
fn stalled_volume_holds_up_only_gets_that_need_it() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (schedule, open) = two_volumes(dir.path());
    let (scope, keys) = (Arc::new(unchained(PAGE)), sequence(1, 80));
    for key in keys.chunks(1) {
        assert_eq!(put(&open.store, &scope, key, None).pages, 1);
    }
    let (stalled, other): (Vec<_>, Vec<_>) =
        keys.into_iter().partition(|key| volume(&open, &scope, key) == 0);
    assert!(
        stalled.len() > STALLED_GETS && other.len() > 4,
        "{} pages are on the stalled volume, {} on the other",
        stalled.len(),
        other.len()
    );

    schedule.add(Rule::always(MediumFault::Stall).on(Op::Read).at("disk0/seg-"));
    let caught: Vec<Ticket> =
        stalled[..STALLED_GETS].iter().map(|key| start_get(&open, &scope, key, LONG)).collect();
    let began = Instant::now();
    for key in &other {
        let ticket = start_get(&open, &scope, key, LONG);
        assert_eq!(ticket.wait(Some(LONG)).expect("the get still waits").pages, 1);
        assert_eq!(get(&open.store, &scope, std::slice::from_ref(key)).pages, 1);
    }
    assert!(!caught[0].done(), "a get from the stalled disk has ended");

    // Once the volume has completed no operation for two seconds, calls submit no operations to it,
    // and its pages are misses with the reason `stalled`.
    std::thread::sleep(Duration::from_millis(2500).saturating_sub(began.elapsed()));
    let outcome = get(&open.store, &scope, &stalled[STALLED_GETS..]);
    assert_eq!((outcome.pages, outcome.reason), (0, "stalled"));
    let both = [stalled[STALLED_GETS].clone(), other[0].clone()];
    assert_eq!(get(&open.store, &scope, &both).ok, [false, true]);

    schedule.heal();
    for ticket in &caught {
        let outcome = ticket.wait(Some(LONG)).expect("the get must end when the disk continues");
        assert!(outcome.pages == 1 || ["deadline", "stalled"].contains(&outcome.reason));
    }
    assert_eq!(get(&open.store, &scope, &stalled).pages, stalled.len(), "a page was removed");
    assert_eq!(open.store.stats().unwrap().catalog.leases, 0);
    open.close();
}

/// The pages of a chained sequence are on both volumes. A get of the sequence returns the pages
/// before the first page on the stalled volume.
#[test]
fn stalled_volume_shortens_a_chained_get() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (schedule, open) = two_volumes(dir.path());
    let (scope, keys) = (Arc::new(chained(PAGE)), sequence(1, 12));
    for pages in 1..=keys.len() {
        assert_eq!(put(&open.store, &scope, &keys[..pages], None).pages, pages);
    }
    let volumes: Vec<u8> = keys.iter().map(|key| volume(&open, &scope, key)).collect();
    let before = volumes.iter().take_while(|number| **number == volumes[0]).count();
    assert!(before < keys.len(), "both volumes must have pages: {volumes:?}");
    let part = format!("disk{}/seg-", volumes[before]);
    schedule.add(Rule::always(MediumFault::Stall).on(Op::Read).at(part));
    let caught = start_get(&open, &scope, &keys[before], SHORT);
    std::thread::sleep(Duration::from_millis(2500));
    let outcome = get(&open.store, &scope, &keys);
    assert_eq!((outcome.pages, outcome.reason), (before, "stalled"), "{volumes:?}");
    schedule.heal();
    assert!(caught.wait(Some(LONG)).is_some());
    assert_eq!(get(&open.store, &scope, &keys).pages, keys.len());
    open.close();
}

#[test]
fn stalled_volume_holds_up_only_puts_to_it() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (schedule, open) = two_volumes(dir.path());
    let scope = Arc::new(unchained(PAGE));
    put(&open.store, &scope, &sequence(1, 1), None);
    schedule.add(Rule::always(MediumFault::Stall).on(Op::Write).at("disk0/seg-"));
    let keys = sequence(2, STALLED_GETS);
    let tickets: Vec<Ticket> = keys.iter().map(|key| start_put(&open, &scope, key, LONG)).collect();
    let began = Instant::now();
    let stored = |ticket: &&Ticket| {
        ticket.done() && ticket.wait(Some(LONG)).is_some_and(|outcome| outcome.pages == 1)
    };
    while tickets.iter().filter(stored).count() < STALLED_GETS / 3 {
        assert!(began.elapsed() < LONG, "stalled puts delay puts to other volumes");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(tickets.iter().any(|ticket| !ticket.done()), "all puts to the stalled disk have ended");
    schedule.heal();
    for ticket in &tickets {
        assert!(ticket.wait(Some(LONG)).is_some());
    }
    assert_eq!(put(&open.store, &scope, &keys, None).pages, STALLED_GETS);
    open.close();
}

#[test]
fn puts_avoid_a_stalled_volume() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (schedule, open) = two_volumes(dir.path());
    let (scope, keys) = (Arc::new(unchained(PAGE)), sequence(1, 40));
    for key in keys.chunks(1) {
        assert_eq!(put(&open.store, &scope, key, None).pages, 1);
    }
    let on_stalled = keys.iter().find(|key| volume(&open, &scope, key) == 0).unwrap();
    schedule.add(Rule::always(MediumFault::Stall).at("disk0/seg-"));
    let caught = start_get(&open, &scope, on_stalled, SHORT);
    std::thread::sleep(Duration::from_millis(2500));
    for key in sequence(2, 10).chunks(1) {
        assert_eq!(put(&open.store, &scope, key, None).pages, 1);
        assert_eq!(volume(&open, &scope, &key[0]), 1);
    }
    schedule.heal();
    assert!(caught.wait(Some(LONG)).is_some());
    for key in sequence(3, 10).chunks(1) {
        assert_eq!(put(&open.store, &scope, key, None).pages, 1);
    }
    let uses_both = sequence(3, 10).iter().any(|key| volume(&open, &scope, key) == 0);
    assert!(uses_both, "puts must use the volume again");
    assert_eq!(open.store.stats().unwrap().catalog.reserved_bytes, 0);
    open.close();
}

/// Neither the put whose segment is being created nor the puts behind it wait longer than their
/// deadlines. The segment is used once it exists.
#[test]
fn put_waits_for_a_new_segment_until_its_deadline() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (schedule, open) = two_volumes(dir.path());
    let (scope, keys) = (Arc::new(unchained(PAGE)), sequence(1, 4));
    schedule.add(Rule::always(MediumFault::Stall).on(Op::Allocate).at("/seg-"));
    let tickets: Vec<Ticket> =
        keys.iter().map(|key| start_put(&open, &scope, key, SHORT)).collect();
    for ticket in &tickets {
        let outcome = ticket.wait(Some(LONG)).expect("the put still waits");
        assert_eq!((outcome.pages, outcome.reason), (0, "deadline"));
    }
    assert!(schedule.injected() > 0);
    schedule.heal();
    assert_eq!(put(&open.store, &scope, &keys, None).pages, 4);
    open.close();
}

#[test]
fn ticket_that_waits_for_a_thread_ends_at_its_deadline() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (_, open) = two_volumes(dir.path());
    let (scope, keys) = (Arc::new(unchained(PAGE)), sequence(1, 1));
    put(&open.store, &scope, &keys, None);
    let (release, blocked) = mpsc::channel::<()>();
    let blocked = Arc::new(Mutex::new(blocked));
    let reads: Vec<Ticket> = (0..STALLED_GETS)
        .map(|_| {
            let blocked = Arc::clone(&blocked);
            let work = move |_: &[&[u8]], _: &Control| {
                let _ = blocked.lock().unwrap().recv();
                Ok(Outcome::default())
            };
            open.store.submit_read(Vec::new(), 0, Control::default(), work).unwrap()
        })
        .collect();
    let outcome = start_get(&open, &scope, &keys[0], SHORT).wait(Some(LONG));
    assert_eq!(outcome.expect("the get still waits").reason, "deadline");
    drop(release);
    for ticket in &reads {
        assert!(ticket.wait(Some(LONG)).is_some());
    }
    open.close();
}

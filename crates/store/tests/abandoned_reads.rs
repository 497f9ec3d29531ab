//! A get through staging memory ends at its deadline although the disk does not answer. Its reads
//! keep their memory until the disk answers. The memory of the caller stays as it was.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_codec::Codec;
use ritornello_format::{Scope, ScopeSettings};
use ritornello_medium::{Faulty, Host, MediumFault, Op, Rule, Schedule};
use ritornello_store::{Options, PutOptions, Ticket};
use ritornello_volume::page_memory::{OwnedPages, OwnedPagesMut};
use ritornello_volume::segments::IoChoice;
use ritornello_volume::transfer::Control;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const PAGE: u64 = 64 << 10;
/// The bytes of a target before a get.
const FILL: u8 = 0xee;
const SHORT: Duration = Duration::from_secs(1);
/// A get that has not ended after this time waits for the disk.
const LATER: Duration = Duration::from_secs(2);
const LONG: Duration = Duration::from_secs(20);

/// A store on two directories. Without `through_staging`, its reads of raw pages go to the target
/// at any alignment, because its files are not open for direct I/O.
fn open_two(dir: &Path) -> (Schedule, Open) {
    let schedule = Schedule::new();
    let medium = Arc::new(Faulty::new(Arc::new(Host), schedule.clone()));
    let paths = ["disk0", "disk1"].map(|name| dir.join(name)).to_vec();
    let options = Options { paths, io: IoChoice::Pool, ..options(&dir.join("home"), 64) };
    let open = open_on(medium, &options).unwrap();
    assert!(!open.core.segments().report().direct);
    (schedule, open)
}

fn stall(schedule: &Schedule, paths: &str) {
    schedule.add(Rule::always(MediumFault::Stall).on(Op::Read).at(paths));
}

struct Get {
    ticket: Ticket,
    target: Arc<OwnedPagesMut>,
}

impl Get {
    fn start(open: &Open, scope: &Arc<Scope>, keys: &[Vec<u8>], control: Control) -> Self {
        let target = vec![vec![FILL; scope.resolved_page_bytes().unwrap() as usize]; keys.len()];
        let target = Arc::new(OwnedPagesMut::new(target));
        let keys = keys.iter().map(|key| key.as_slice().into()).collect();
        let into = Arc::clone(&target);
        let ticket = open.store.submit_get(Arc::clone(scope), keys, into, control).unwrap();
        Self { ticket, target }
    }

    /// The pages of the target, once the ticket holds no reference to it.
    fn into_pages(self) -> Vec<Vec<u8>> {
        assert!(self.ticket.done());
        drop(self.ticket);
        let began = Instant::now();
        let mut target = self.target;
        loop {
            match Arc::try_unwrap(target) {
                Ok(target) => return target.into_inner(),
                Err(shared) => target = shared,
            }
            assert!(began.elapsed() < LONG, "the target is still in use");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn control(limit: Duration, through_staging: bool) -> Control {
    let deadline = Some(Instant::now() + limit);
    Control { deadline, through_staging, ..Control::default() }
}

fn staging_in_use(open: &Open) -> usize {
    open.core.segments().staging().in_use
}

fn await_free_staging(open: &Open) {
    let began = Instant::now();
    while staging_in_use(open) > 0 {
        assert!(began.elapsed() < LONG, "reads that were left behind keep their memory");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn staged_get_ends_at_its_deadline_while_a_direct_get_waits() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (schedule, open) = open_two(dir.path());
    let (scope, keys) = (Arc::new(unchained(PAGE)), sequence(1, 4));
    assert_eq!(put(&open.store, &scope, &keys, None).pages, 4);
    assert_eq!(get(&open.store, &scope, &keys).pages, 4);

    stall(&schedule, "/seg-");
    let began = Instant::now();
    let direct = Get::start(&open, &scope, &keys[..1], control(SHORT, false));
    let staged = Get::start(&open, &scope, &keys[1..], control(SHORT, true));
    let outcome = staged.ticket.wait(Some(LONG)).expect("the staged get still waits");
    assert_eq!((outcome.pages, outcome.reason), (0, "deadline"));
    assert!(began.elapsed() >= SHORT);
    let held = staging_in_use(&open);
    assert!(held as u64 >= 3 * PAGE, "{held} bytes of staging memory are in use");
    assert_eq!(open.store.stats().unwrap().catalog.leases, 1, "only the direct get has a lease");
    std::thread::sleep(LATER);
    assert!(!direct.ticket.done(), "the kernel still writes to the target of the direct get");
    assert_eq!(staging_in_use(&open), held);
    let outcome = get(&open.store, &scope, &keys);
    assert_eq!((outcome.pages, outcome.reason), (0, "stalled"), "reads are in flight");

    schedule.heal();
    let outcome = direct.ticket.wait(Some(LONG)).expect("the disk has answered");
    assert_eq!((outcome.pages, outcome.reason), (1, ""));
    await_free_staging(&open);
    assert_eq!(direct.into_pages(), [page(&scope, &keys[0])]);
    assert!(staged.into_pages().iter().flatten().all(|byte| *byte == FILL));
    assert_eq!(get(&open.store, &scope, &keys).pages, 4);
    assert_eq!(open.store.stats().unwrap().catalog.leases, 0);
    open.close();
}

#[test]
fn get_of_encoded_pages_ends_when_it_is_cancelled() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (schedule, open) = open_two(dir.path());
    let (scope, keys) = (Arc::new(numbers()), sequence(1, 3));
    let settings = ScopeSettings { codec: Some(Codec::Split.number()), ..ScopeSettings::default() };
    open.store.configure(&scope, &settings).unwrap();
    let pages: Vec<Vec<u8>> = keys.iter().map(|key| compressible(&scope, key)).collect();
    let (source, options) = (OwnedPages::new(pages.clone()), PutOptions::default());
    let put = open.store.put_batch(&scope, &refs(&keys), &source, &options, &Control::default());
    assert_eq!(put.unwrap().pages, 3);

    stall(&schedule, "/seg-");
    let cancelled = Get::start(&open, &scope, &keys, control(LONG, false));
    std::thread::sleep(SHORT);
    assert!(!cancelled.ticket.done() && staging_in_use(&open) > 0);
    cancelled.ticket.cancel();
    let outcome = cancelled.ticket.wait(Some(LONG / 2)).expect("the get still waits");
    assert_eq!((outcome.pages, outcome.reason), (0, "cancelled"));
    assert!(staging_in_use(&open) > 0);
    schedule.heal();
    await_free_staging(&open);
    assert!(cancelled.into_pages().iter().flatten().all(|byte| *byte == FILL));
    let again = Get::start(&open, &scope, &keys, control(LONG, false));
    assert_eq!(again.ticket.wait(Some(LONG)).unwrap().pages, 3);
    assert_eq!(again.into_pages(), pages);
    open.close();
}

/// A scope whose pages are numbers, of 64 KiB.
fn numbers() -> Scope {
    Scope {
        dtype: "bfloat16".to_owned(),
        page_tokens: 16,
        layers: (0, 16),
        kv_heads: (0, 1),
        head_dim: 64,
        layout: "page_first".to_owned(),
        page_bytes: None,
        ..Scope::opaque("numbers", 1, true)
    }
}

/// A page of numbers with few exponents, which `split` shortens.
fn compressible(scope: &Scope, key: &[u8]) -> Vec<u8> {
    let mut page = page(scope, key);
    page.iter_mut().skip(1).step_by(2).for_each(|byte| *byte = 0x3f);
    page
}

/// 24 puts store a page each, on both directories in turn. The get delivers the pages of one of them.
#[test]
fn staged_get_delivers_the_pages_that_were_read() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (schedule, open) = open_two(dir.path());
    let (scope, keys) = (Arc::new(unchained(PAGE)), sequence(1, 24));
    for key in keys.chunks(1) {
        assert_eq!(put(&open.store, &scope, key, None).pages, 1);
    }
    stall(&schedule, "disk1/seg-");
    let part = Get::start(&open, &scope, &keys, control(SHORT, true));
    let outcome = part.ticket.wait(Some(LONG)).expect("the get still waits");
    assert_eq!(outcome.reason, "deadline");
    let read = outcome.ok.iter().filter(|ok| **ok).count();
    assert!((1..keys.len()).contains(&read), "{:?}", outcome.ok);
    schedule.heal();
    await_free_staging(&open);
    for ((key, got), ok) in keys.iter().zip(part.into_pages()).zip(&outcome.ok) {
        let expected = if *ok { page(&scope, key) } else { vec![FILL; PAGE as usize] };
        assert!(got == expected, "page read: {ok}");
    }
    open.close();
}

#[test]
fn store_closes_and_opens_while_reads_are_left_behind() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (schedule, open) = open_two(dir.path());
    let (scope, keys) = (Arc::new(unchained(PAGE)), sequence(1, 4));
    assert_eq!(put(&open.store, &scope, &keys, None).pages, 4);
    stall(&schedule, "/seg-");
    let left = Get::start(&open, &scope, &keys, control(SHORT, true));
    assert_eq!(left.ticket.wait(Some(LONG)).expect("the get still waits").reason, "deadline");
    let core = Arc::downgrade(&open.core);
    open.close();
    assert!(core.upgrade().is_none(), "the closed store is still in use");
    // The second store has another schedule: its reads do not hang.
    let (_, open) = open_two(dir.path());
    assert_eq!(get(&open.store, &scope, &keys).pages, 4);
    open.close();
    schedule.heal();
    assert!(left.into_pages().iter().flatten().all(|byte| *byte == FILL));
}

/// A volume's pool has 16 threads: the reads of further gets wait for a thread until the gets end.
#[test]
fn reads_that_no_thread_has_begun_do_not_end_a_stall() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (schedule, open) = open_two(dir.path());
    let (scope, keys) = (Arc::new(unchained(PAGE)), sequence(1, 64));
    for key in keys.chunks(1) {
        assert_eq!(put(&open.store, &scope, key, None).pages, 1);
    }
    stall(&schedule, "/seg-");
    let limit = LATER + SHORT;
    let gets: Vec<Get> =
        keys.chunks(2).map(|two| Get::start(&open, &scope, two, control(limit, true))).collect();
    for get in &gets {
        let outcome = get.ticket.wait(Some(LONG)).expect("the get still waits");
        assert_eq!((outcome.pages, outcome.reason), (0, "deadline"));
    }
    let late = Get::start(&open, &scope, &keys[..2], control(LONG, true));
    assert_eq!(late.ticket.wait(Some(SHORT)).map(|outcome| outcome.reason), Some("stalled"));
    schedule.heal();
    await_free_staging(&open);
    assert_eq!(get(&open.store, &scope, &keys).pages, keys.len());
    open.close();
}

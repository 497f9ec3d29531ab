//! Checks of a backend before it is used: the conformance suite, and how a `RemoteTier` over the
//! backend behaves while faults are injected.

use super::backend::{Backend, Listed};
use super::conformance::{Check, conformance};
use super::faults::{BackendFault, FaultyBackend};
use super::inventory::Inventory;
use super::packing::Prompt;
use super::remote_tier::RemoteTier;
use ritornello_format::{Result, ScopeId};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// Pages of the test prompt, and bytes per page: one full object of 8 MiB, and a remainder.
const PAGES: usize = 41;
const PAGE_BYTES: usize = 256 << 10;
/// Deadline of a call while a fault is injected, and the time by which such a call may exceed it on
/// a busy machine.
const DEADLINE: Duration = Duration::from_millis(300);
const DEADLINE_MARGIN: Duration = Duration::from_secs(20);
/// Deadline of transfers without a fault.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(120);

type Outcome = std::result::Result<(), String>;

/// Runs [`conformance`] on `backend`. Then, for every [`BackendFault`], writes pages with a
/// [`RemoteTier`] over it, and reads them while the fault is injected and after it ended. All names
/// begin with `prefix`, which must end with a slash and which no other writer may use. Deletes the
/// written values, if the backend can list and delete. The suite, and the test of each fault, fail
/// if they take longer than `timeout`. If the backend cannot be reached, or the suite does not end
/// in time, no further checks run.
#[must_use]
pub fn check_backend(backend: &Arc<dyn Backend>, prefix: &str, timeout: Duration) -> Vec<Check> {
    let mut checks = Vec::new();
    let prefixed: Arc<dyn Backend> =
        Arc::new(PrefixedBackend { inner: Arc::clone(backend), prefix: prefix.to_owned() });
    let (inner, name) = (Arc::clone(backend), format!("{prefix}never"));
    let reached =
        run_with_timeout(timeout, move || inner.exists(&name).map_err(|error| error.to_string()));
    if let Err(failure) = reached.and_then(|reached| reached) {
        return vec![Check { what: "the backend can be reached", failure: Some(failure) }];
    }
    let (inner, names) = (Arc::clone(backend), prefix.to_owned());
    match run_with_timeout(timeout, move || conformance(inner.as_ref(), &names)) {
        Ok(conforms) => checks.extend(conforms),
        Err(failure) => return vec![Check { what: "every call returns", failure: Some(failure) }],
    }
    let scenarios: [(&'static str, BackendFault); 7] = [
        ("pages are read back through the tier", BackendFault::None),
        ("an unavailable remote costs hits", BackendFault::Unavailable),
        ("a refusing remote costs hits", BackendFault::Refused),
        ("a hanging remote costs hits, and calls end by their deadline", BackendFault::Hangs),
        ("truncated values cost hits, and are detected", BackendFault::Short),
        ("damaged bytes cost hits, and are detected", BackendFault::Flipped),
        ("vanished values cost hits", BackendFault::Gone),
    ];
    for (number, (what, fault)) in scenarios.into_iter().enumerate() {
        let prefixed = Arc::clone(&prefixed);
        let outcome = run_with_timeout(timeout, move || check_fault(prefixed, fault, number as u8))
            .and_then(|outcome| outcome);
        checks.push(Check { what, failure: outcome.err() });
    }
    let outcome =
        run_with_timeout(timeout, move || clean_up(prefixed.as_ref())).and_then(|outcome| outcome);
    checks.push(Check {
        what: "the inventory has as many pages as were written",
        failure: outcome.err(),
    });
    checks
}

/// Runs `run` on a separate thread; fails if `run` does not return within `timeout`.
fn run_with_timeout<T: Send + 'static>(
    timeout: Duration,
    run: impl FnOnce() -> T + Send + 'static,
) -> std::result::Result<T, String> {
    let (sender, result) = sync_channel(1);
    let thread = thread::Builder::new().name("ritornello-check".to_owned());
    let started = thread.spawn(move || {
        let _ = sender.send(run());
    });
    started.map_err(|error| format!("no thread can be started for the check: {error}"))?;
    result.recv_timeout(timeout).map_err(|error| match error {
        RecvTimeoutError::Timeout => format!("no answer within {} s", timeout.as_secs()),
        RecvTimeoutError::Disconnected => "a call panicked".to_owned(),
    })
}

/// Writes the pages of a new prompt, reads them while `fault` is injected, and reads them again.
fn check_fault(backend: Arc<dyn Backend>, fault: BackendFault, number: u8) -> Outcome {
    let scope = ScopeId([number; 16]);
    let keys: Vec<Vec<u8>> = (0..PAGES as u8).map(|at| [[number, at]; 16].concat()).collect();
    let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let pages: Vec<Vec<u8>> = (0..PAGES).map(|at| page(number, at)).collect();
    let prompt =
        Prompt { scope: &scope, page_bytes: PAGE_BYTES as u64, chained: true, keys: &keys };
    let between = Arc::new(FaultyBackend::new(backend));
    let tier = || RemoteTier::new(Arc::clone(&between) as Arc<dyn Backend>);
    let patient = || Instant::now() + TRANSFER_TIMEOUT;

    let put = tier().put(&prompt, 0..PAGES, |at| &pages[at], patient());
    expect_eq("pages written", put.map_err(|error| error.to_string())?, PAGES)?;
    // Find the pages before the fault begins, so that the reader attempts to read them.
    let reader = tier();
    let found = reader.probe(&prompt, patient()).map_err(|error| error.to_string())?;
    expect_eq("pages found", found, PAGES)?;
    if fault != BackendFault::None {
        between.fail(fault);
        let during_fault = read_during_fault(&reader, &prompt, &pages);
        between.fail(BackendFault::None);
        expect_eq("fewer than all pages are read during the fault", during_fault? < PAGES, true)?;
    }
    let mut out = vec![0; PAGES * PAGE_BYTES];
    let copied = tier().get(&prompt, 0..PAGES, &mut out, patient());
    expect_eq("pages read", copied.map_err(|error| error.to_string())?, PAGES)?;
    check_pages(&pages, &out, 0..PAGES)?;
    let copied = tier().get(&prompt, 3..PAGES - 1, &mut out[..(PAGES - 4) * PAGE_BYTES], patient());
    expect_eq("pages read from the middle", copied.map_err(|error| error.to_string())?, PAGES - 4)?;
    check_pages(&pages, &out, 3..PAGES - 1)
}

fn read_during_fault(
    reader: &RemoteTier,
    prompt: &Prompt<'_>,
    pages: &[Vec<u8>],
) -> std::result::Result<usize, String> {
    let mut out = vec![0; PAGES * PAGE_BYTES];
    let began = Instant::now();
    let copied = reader
        .get(prompt, 0..PAGES, &mut out, began + DEADLINE)
        .map_err(|error| error.to_string())?;
    if began.elapsed() > DEADLINE + DEADLINE_MARGIN {
        return Err(format!("a read with a deadline of {DEADLINE:?} took {:?}", began.elapsed()));
    }
    check_pages(pages, &out, 0..copied)?;
    Ok(copied)
}

fn check_pages(pages: &[Vec<u8>], out: &[u8], range: Range<usize>) -> Outcome {
    let pairs = range.zip(out.chunks(PAGE_BYTES));
    match pairs.into_iter().find(|(at, out)| pages[*at] != *out) {
        None => Ok(()),
        Some((at, _)) => Err(format!("page {at} has different bytes")),
    }
}

fn expect_eq<T: PartialEq + std::fmt::Debug>(what: &str, is: T, should: T) -> Outcome {
    if is == should { Ok(()) } else { Err(format!("{what}: {is:?} instead of {should:?}")) }
}

fn page(number: u8, at: usize) -> Vec<u8> {
    let seed = u64::from(number) << 32 | at as u64;
    let word =
        |n: u64| (n ^ seed << 20).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(17).to_le_bytes();
    (0..PAGE_BYTES as u64 / 8).flat_map(word).collect()
}

fn clean_up(backend: &dyn Backend) -> Outcome {
    // A backend that cannot list has no inventory to check.
    let Ok(inventory) = Inventory::take(backend) else { return Ok(()) };
    for object in &inventory.objects {
        let _ = backend.delete(&object.name);
    }
    expect_eq("pages in the inventory", inventory.pages(), 7 * PAGES as u64)
}

/// A backend that puts a prefix before every name.
#[derive(Debug)]
struct PrefixedBackend {
    inner: Arc<dyn Backend>,
    prefix: String,
}

impl PrefixedBackend {
    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

impl Backend for PrefixedBackend {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>> {
        self.inner.get(&self.name(name), range)
    }

    fn exists(&self, name: &str) -> Result<bool> {
        self.inner.exists(&self.name(name))
    }

    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        self.inner.set(&self.name(name), value)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.inner.delete(&self.name(name))
    }

    fn list(&self, prefix: &str, each: &mut dyn FnMut(Listed)) -> Result<()> {
        self.inner.list(&self.name(prefix), &mut |mut found| {
            if let Some(name) = found.name.strip_prefix(&self.prefix) {
                found.name = name.to_owned();
                each(found);
            }
        })
    }

    fn exists_batch(&self, names: &[&str]) -> Vec<Result<bool>> {
        let names: Vec<String> = names.iter().map(|name| self.name(name)).collect();
        self.inner.exists_batch(&names.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn get_batch(&self, requests: &[(&str, Option<Range<u64>>)]) -> Vec<Result<Option<Vec<u8>>>> {
        let requests: Vec<_> =
            requests.iter().map(|(name, range)| (self.name(name), range.clone())).collect();
        let requests: Vec<_> =
            requests.iter().map(|(name, range)| (name.as_str(), range.clone())).collect();
        self.inner.get_batch(&requests)
    }
}

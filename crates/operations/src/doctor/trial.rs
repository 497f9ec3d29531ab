//! A trial of the store: put, read back, compare.

use super::finding::Finding;
use ritornello_format::Scope;
use ritornello_medium::{Host, Medium};
use ritornello_node::{Node, Role};
use ritornello_store::{CatalogStats, Options, Outcome, PutOptions, Store};
use ritornello_terminal::exit::Failure;
use ritornello_terminal::open;
use ritornello_terminal::scratch::Scratch;
use ritornello_volume::baseline::{Limit, Rate};
use ritornello_volume::staging::Staging;
use ritornello_volume::transfer::Control;
use ritornello_volume::{BorrowedPages, BorrowedPagesMut};
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;

const PAGE: usize = 256 << 10;
/// Maximum pages of the trial; if space is short, or the store is small, the trial has fewer.
const PAGES_MAX: u64 = 256;
/// Bytes per segment of a temporary store.
const SEGMENT_BYTES: u64 = 16 << 20;

/// Number of pages of the trial, and rates of transfers with and without the store.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Rates {
    /// Pages written, read back and compared.
    pub pages: u64,
    /// Rate of one put of all pages with the flush after it.
    pub write_gib_s: f64,
    /// Rate of one get of all pages.
    pub read_gib_s: f64,
    /// Rate of overwriting a file without the store; `null` if it could not be measured.
    pub raw_write_gib_s: Option<f64>,
    /// Rate of reading a file without the store; `null` if it could not be measured.
    pub raw_read_gib_s: Option<f64>,
}

/// Runs a trial in the store in `dir` if `is_store` is set, otherwise in a temporary store inside
/// `dir`. Returns the rates and further findings.
///
/// # Errors
/// Any fault of the store or the disk; the caller reports it as a finding.
pub fn run(dir: &Path, is_store: bool) -> Result<(Rates, Vec<Finding>), Failure> {
    let scratch = Scratch::new(dir, "doctor")?;
    let pages = pages(dir)?;
    let node = if is_store { open::existing(dir)? } else { temporary(scratch.path(), pages)? };
    let mut findings = vec![Finding::fine("opened as", describe_role(&node))];
    let stats = node.store().stats()?.catalog;
    findings.extend(condition(&stats));
    // Put at most a twentieth of the store's capacity, so that the trial evicts few pages of a
    // small store.
    let pages =
        if is_store { pages.min(stats.capacity_bytes / 20 / PAGE as u64).max(1) } else { pages };
    let scope =
        Scope::opaque(&format!("ritornello doctor {}", std::process::id()), PAGE as u64, true);
    let tried = run_trial(node.store(), &scope, pages as usize);
    let dropped = node.store().drop_scope(&scope);
    node.close()?;
    let (write, read) = tried?;
    dropped?;
    let raw = raw(scratch.path(), pages * PAGE as u64);
    let rates = Rates {
        pages,
        write_gib_s: write.gib_s(),
        read_gib_s: read.gib_s(),
        raw_write_gib_s: raw.map(|(write, _)| write.gib_s()),
        raw_read_gib_s: raw.map(|(_, read)| read.gib_s()),
    };
    findings.push(describe(&rates));
    Ok((rates, findings))
}

fn pages(dir: &Path) -> Result<u64, Failure> {
    let room = Host.room(dir)?.available;
    // Use an eighth of the free space, which leaves space for the file of the raw measurement and a
    // margin; but at least 4 MiB, and at most 64 MiB.
    Ok((room / 8 / PAGE as u64).clamp(16, PAGES_MAX))
}

fn temporary(dir: &Path, pages: u64) -> Result<Arc<Node>, Failure> {
    let mut options = Options::new(dir.join("store"));
    options.capacity = Some(pages * PAGE as u64 * 3 / 2 + 4 * SEGMENT_BYTES);
    options.segment_bytes = Some(SEGMENT_BYTES);
    open::with(&options)
}

fn describe_role(node: &Node) -> String {
    match node.role() {
        Role::Owner => "owner".to_owned(),
        Role::Client => {
            let pid = node.store().stats().map_or(0, |stats| stats.catalog.owner_pid);
            format!("client of process {pid}")
        }
    }
}

fn condition(stats: &CatalogStats) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(cause) = &stats.poisoned {
        let change =
            "check the disk (dmesg); the owner reopens the store when the disk takes writes again";
        findings.push(Finding::wrong("store", format!("poisoned: {cause}"), change));
    }
    for reason in &stats.absent_space.reasons {
        let change = "mount its disk, or give it up: `ritornello paths forget DIR PATH`";
        findings.push(Finding::wrong("store", format!("degraded: {reason}"), change));
    }
    if stats.quarantined_bytes > 0 {
        let found = format!(
            "{} in quarantine: bytes that failed verification or could not be written",
            ritornello_terminal::print::bytes(stats.quarantined_bytes)
        );
        findings.push(Finding::advice("store", found, "check the disk, then `ritornello fsck`"));
    }
    findings
}

/// Puts `pages` pages, flushes, reads them back into other memory, and compares all bytes. Returns
/// the rates of writing and reading.
fn run_trial(store: &Store, scope: &Scope, pages: usize) -> Result<(Rate, Rate), Failure> {
    let staging = Staging::new(2 * pages * PAGE)?;
    let none = || Failure::failed("no memory for the trial", "free some memory");
    let mut source = staging.try_take(pages * PAGE).ok_or_else(none)?;
    let mut target = staging.try_take(pages * PAGE).ok_or_else(none)?;
    for (at, word) in source.bytes_mut().chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    }
    target.bytes_mut().fill(0);
    let keys: Vec<[u8; 16]> = (0..pages).map(|page| (page as u128 + 1).to_le_bytes()).collect();
    let keys: Vec<&[u8]> = keys.iter().map(<[u8; 16]>::as_slice).collect();
    let bytes = (pages * PAGE) as u64;
    let mut outcome = Outcome::default();
    let write = Rate::of(bytes, || {
        let slices: Vec<&[u8]> = source.bytes().chunks_exact(PAGE).collect();
        let control = Control::default();
        outcome = store.put_batch(
            scope,
            &keys,
            &BorrowedPages::new(&slices),
            &PutOptions::default(),
            &control,
        )?;
        store.flush()
    })?;
    complete("put", &outcome, pages)?;
    let found = store.probe(scope, &keys)?;
    if found < pages {
        return Err(Failure::failed(
            format!("a probe found only {found} of the {pages} pages that were put before"),
            "report this, with the disk and the file system",
        ));
    }
    let read = Rate::of(bytes, || {
        let mut slices: Vec<&mut [u8]> = target.bytes_mut().chunks_exact_mut(PAGE).collect();
        let target = BorrowedPagesMut::new(&mut slices);
        outcome = store.get_batch(scope, &keys, &target, &Control::default())?;
        Ok(())
    })?;
    complete("get", &outcome, pages)?;
    if source.bytes() == target.bytes() {
        return Ok((write, read));
    }
    Err(Failure::failed(
        "WRONG BYTES were read: they verified, but differ from the bytes put",
        "do not use this directory; report this, with the disk and the file system",
    ))
}

fn complete(what: &str, outcome: &Outcome, pages: usize) -> Result<(), Failure> {
    if outcome.pages == pages {
        return Ok(());
    }
    Err(Failure::failed(
        format!("a {what} of {pages} pages ended after {}: {}", outcome.pages, outcome.reason),
        "free some space, or check the disk (dmesg)",
    ))
}

fn raw(dir: &Path, bytes: u64) -> Option<(Rate, Rate)> {
    let measured = Limit::prepare(Arc::new(Host), dir, bytes).and_then(|mut limit| {
        limit.write()?;
        Ok((limit.write()?, limit.read()?))
    });
    measured
        .inspect_err(
            |error| tracing::info!(%error, "the disk could not be measured without the store"),
        )
        .ok()
}

fn describe(rates: &Rates) -> Finding {
    let beside = |raw: Option<f64>| raw.map_or_else(String::new, |raw| format!(" ({raw:.1} raw)"));
    Finding::fine(
        "trial",
        format!(
            "{} pages of {} KiB written at {:.1} GiB/s{}, read at {:.1} GiB/s{}, every byte compared",
            rates.pages,
            PAGE >> 10,
            rates.write_gib_s,
            beside(rates.raw_write_gib_s),
            rates.read_gib_s,
            beside(rates.raw_read_gib_s)
        ),
    )
}

//! Ingest, both probes, disk, memory and reopen figures of the `lsm` index, metadata only.
//!
//! `make rocksdb`, then with the variables that `make -n test-lsm` shows:
//! `cargo run --release -p ritornello-index --features lsm --example measure_lsm -- [PAGES] [RUN_PAGES]`

use ritornello_format::{PageHashes, Result, ScopedKeys};
use ritornello_index::lsm::Probe;
use ritornello_index::synthetic::{SLOT, Shape, mix};
use ritornello_index::{LsmIndex, LsmOptions, PrefixIndex};
use std::hint::black_box;
use std::time::Instant;

fn percentile(samples: &mut [u64], of: f64) -> f64 {
    samples.sort_unstable();
    samples[((samples.len() - 1) as f64 * of) as usize] as f64 / 1000.0
}

/// Nanoseconds of probes of whole chains at random, keys hashed on the way.
fn probe(index: &LsmIndex, shape: &Shape, by: Probe, count: u64, walk: bool) -> Vec<u64> {
    let scope = shape.scope();
    let mut samples = Vec::with_capacity(count as usize);
    for at in 0..count {
        let keys = shape.keys(mix(at) % shape.chains());
        let keys: Vec<&[u8]> = keys.iter().map(|key| key.as_slice()).collect();
        let asked = ScopedKeys { scope: &scope, keys: black_box(&keys) };
        let started = Instant::now();
        let found = if walk {
            index.walk_by(by, SLOT, &asked).iter().map(|step| step.pages as usize).sum()
        } else {
            index.longest_prefix_by(by, SLOT, &asked)
        };
        samples.push(started.elapsed().as_nanos() as u64);
        assert_eq!(found, asked.len());
    }
    samples
}

fn probes(index: &LsmIndex, shape: &Shape, when: &str) {
    for by in [Probe::Bisect, Probe::Scan] {
        for (walk, what) in [(false, "prefix"), (true, "walk")] {
            let mut samples = probe(index, shape, by, 20_000, walk);
            println!(
                "{when}: {what} of 256 by {by:?} p50 {:.1} us, p99 {:.1} us",
                percentile(&mut samples, 0.5),
                percentile(&mut samples, 0.99)
            );
        }
    }
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1).filter_map(|argument| argument.parse().ok());
    let pages = arguments.next().unwrap_or(1_000_000);
    let run_pages = arguments.next().unwrap_or(32) as u32;
    let shape = Shape { pages, run_pages, ..Shape::default() };
    let dir = std::env::temp_dir().join(format!("ritornello-measure-{}", std::process::id()));
    let open = |verify| LsmIndex::open(&dir, &LsmOptions { verify, ..LsmOptions::default() });
    let index = open(true)?;
    let started = Instant::now();
    let runs = shape.fill(&index)?;
    let seconds = started.elapsed().as_secs_f64();
    println!("{pages} pages in {runs} runs of {run_pages}");
    println!("ingest with sync {:.0} k pages/s", pages as f64 / seconds / 1e3);
    probes(&index, &shape, "as written");
    let stats = index.stats();
    let each = |bytes: u64| bytes as f64 / pages as f64;
    println!(
        "a page: {:.1} B written, {:.1} B of memory, {:.1} B on disk",
        each(stats.written_bytes),
        each(stats.memory_bytes),
        each(stats.disk_bytes)
    );
    drop(index);
    for verify in [true, false] {
        let mut millis = Vec::new();
        for _ in 0..5 {
            let started = Instant::now();
            drop(black_box(open(verify)?));
            millis.push(started.elapsed().as_micros() as u64);
        }
        let millis = percentile(&mut millis, 0.5);
        println!("open and close, verify {verify}: {millis:.1} ms");
    }
    let index = open(false)?;
    println!("closed: {:.1} B on disk a page", each(index.stats().disk_bytes));
    probes(&index, &shape, "opened again");
    let started = Instant::now();
    let removed = index.remove_scope(SLOT);
    let seconds = started.elapsed().as_secs_f64();
    println!("remove all {:.0} k pages/s ({} runs)", pages as f64 / seconds / 1e3, removed.len());
    drop(index);
    std::fs::remove_dir_all(&dir)?;
    Ok(())
}

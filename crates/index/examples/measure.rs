//! Measures probes, ingest, memory, checkpoint, reopening and removal of the `run` index, without
//! page data.
//!
//! `cargo run --release -p ritornello-index --example measure -- [PAGES] [RUN_PAGES]`
//!
//! PAGES is the number of pages (default 1,000,000), RUN_PAGES the number of pages per run, 1 to
//! 65,535 (default 32). Warm probes are all of the same chain; each cold probe is of a
//! pseudo-random chain.

use ritornello_format::{PageHash, PageHashes, Result, ScopedKeys};
use ritornello_index::synthetic::{SLOT, Shape, mix};
use ritornello_index::{PrefixIndex, RunIndex, RunOptions};
use ritornello_medium::Host;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

/// Returns the sample at rank `of` (0 to 1), divided by 1,000.
fn percentile(samples: &mut [u64], of: f64) -> f64 {
    samples.sort_unstable();
    samples[((samples.len() - 1) as f64 * of) as usize] as f64 / 1000.0
}

/// Returns the nanoseconds of each probe of the chains that `pick` selects, including the hashing
/// of keys.
fn probe(
    index: &dyn PrefixIndex,
    shape: &Shape,
    count: u64,
    pick: impl Fn(u64) -> u64,
) -> Vec<u64> {
    let scope = shape.scope();
    let mut samples = Vec::with_capacity(count as usize);
    for at in 0..count {
        let keys = shape.keys(pick(at));
        let keys: Vec<&[u8]> = keys.iter().map(|key| key.as_slice()).collect();
        let started = Instant::now();
        let found = index.probe(SLOT, &ScopedKeys { scope: &scope, keys: black_box(&keys) });
        samples.push(started.elapsed().as_nanos() as u64);
        assert_eq!(found, keys.len());
    }
    samples
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1).filter_map(|argument| argument.parse().ok());
    let pages = arguments.next().unwrap_or(1_000_000);
    let run_pages = arguments.next().unwrap_or(32) as u32;
    let shape = Shape { pages, run_pages, ..Shape::default() };
    let dir = std::env::temp_dir().join(format!("ritornello-measure-{}", std::process::id()));
    let options = RunOptions::default;
    let open = || RunIndex::open(Arc::new(Host), &dir, options());

    let before = resident();
    let index = open()?;
    let started = Instant::now();
    let runs = shape.fill(&index)?;
    let seconds = started.elapsed().as_secs_f64();
    let taken = resident() - before;
    let stats = index.stats();
    println!("{pages} pages in {runs} runs of {run_pages}");
    println!("ingest with sync {:.2} M pages/s", pages as f64 / seconds / 1e6);
    println!(
        "memory {:.1} B/page resident, {:.1} counted by the index; journal {:.1} B/page",
        taken as f64 / pages as f64,
        stats.memory_bytes as f64 / pages as f64,
        stats.written_bytes as f64 / pages as f64
    );
    let chains = (pages / 256).max(1);
    let mut clock: Vec<u64> =
        (0..10_000).map(|_| Instant::now().elapsed().as_nanos() as u64).collect();
    println!("reading the clock p50 {:.3} us", percentile(&mut clock, 0.5));
    let mut warm = probe(&index, &shape, 100_000, |_| 7 % chains);
    println!(
        "probe of 256 pages, warm: p50 {:.3} us, p99 {:.3} us",
        percentile(&mut warm, 0.5),
        percentile(&mut warm, 0.99)
    );
    let mut cold = probe(&index, &shape, 100_000, |at| mix(at) % chains);
    println!(
        "probe of 256 pages, cold: p50 {:.3} us, p99 {:.3} us",
        percentile(&mut cold, 0.5),
        percentile(&mut cold, 0.99)
    );
    let batches: Vec<Vec<PageHash>> = (0..2_000)
        .map(|at| {
            let keys = shape.keys(mix(at) % chains);
            let keys: Vec<&[u8]> = keys.iter().map(|key| key.as_slice()).collect();
            let scope = shape.scope();
            let keys = ScopedKeys { scope: &scope, keys: &keys };
            (0..keys.len()).map(|at| keys.at(at)).collect()
        })
        .collect();
    for threads in [1, 2, 4] {
        let started = Instant::now();
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let (index, batches) = (&index, &batches);
                scope.spawn(move || {
                    for at in 0..200_000 {
                        let keys = &batches[(at * 7 + thread * 13) % batches.len()];
                        black_box(index.probe(SLOT, keys));
                    }
                });
            }
        });
        let rate = (threads * 200_000) as f64 / started.elapsed().as_secs_f64();
        println!("{threads} threads: {:.2} M probes/s in all", rate / 1e6);
    }
    let reopen = |index: RunIndex, what: &str| -> Result<RunIndex> {
        drop(index);
        let mut millis = Vec::new();
        let mut last = None;
        for _ in 0..5 {
            drop(last.take());
            let started = Instant::now();
            last = Some(open()?);
            millis.push(started.elapsed().as_micros() as u64);
        }
        println!("reopen from {what}, median {:.1} ms", percentile(&mut millis, 0.5));
        last.ok_or_else(|| ritornello_format::Error::miss("the index was not opened"))
    };
    let index = reopen(index, "journal")?;
    let started = Instant::now();
    index.checkpoint()?;
    println!("checkpoint {:.1} ms", started.elapsed().as_secs_f64() * 1e3);
    let index = reopen(index, "checkpoint")?;
    let started = Instant::now();
    let removed = index.drop_scope(SLOT);
    println!(
        "remove all {:.2} M pages/s ({} runs)",
        pages as f64 / started.elapsed().as_secs_f64() / 1e6,
        removed.len()
    );
    drop(index);
    std::fs::remove_dir_all(&dir)?;
    Ok(())
}

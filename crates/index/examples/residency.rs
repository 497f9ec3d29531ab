//! Measures the backends of `Residency`: memory, files, puts, probes and removals.
//!
//! `cargo run --release -p ritornello-index --features lsm --example residency -- [PAGES] [RUN_PAGES] [BACKEND]`
//!
//! Eight workers hold chains of 256 pages, PAGES in all (default 1,000,000, at least 256, rounded
//! down to whole chains), put in calls of up to RUN_PAGES pages each (default 16), as in KV events.
//! Each worker holds the leading pages of each chain, up to a pseudo-random length; one worker
//! holds the whole chain. BACKEND selects `run`, `lsm` or `memory` (default all).

use ritornello_format::{PageHash, Result, ScopeSlot};
#[cfg(feature = "lsm")]
use ritornello_index::residency::{LsmResidency, LsmResidencyOptions};
use ritornello_index::residency::{
    MemoryResidency, Residency, RunResidency, RunResidencyOptions, Tier, Tiers, Worker,
};
use ritornello_index::synthetic::mix;
use ritornello_medium::Host;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

const SCOPE: ScopeSlot = ScopeSlot(1);
const WORKERS: u64 = 8;
const CHAIN: u64 = 256;

fn chain(number: u64) -> Vec<PageHash> {
    let hash = |at| {
        let low = mix(number << 32 | at);
        PageHash((u128::from(mix(low)) << 64 | u128::from(low | 1)).to_le_bytes())
    };
    (0..CHAIN).map(hash).collect()
}

/// Number of leading pages of a chain that a worker holds.
fn held(number: u64, worker: u64) -> usize {
    if (number + worker).is_multiple_of(WORKERS) {
        256
    } else {
        (mix(number * WORKERS + worker) % 256) as usize
    }
}

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

fn percentile(samples: &mut [f64], of: f64) -> f64 {
    samples.sort_unstable_by(f64::total_cmp);
    samples[((samples.len() - 1) as f64 * of) as usize]
}

fn measure(
    name: &str,
    pages: u64,
    run_pages: usize,
    open: &dyn Fn() -> Result<Box<dyn Residency>>,
) -> Result<()> {
    let chains = pages / CHAIN;
    let before = resident();
    let index = open()?;
    let (mut entries, mut puts, started) = (0, 0u64, Instant::now());
    for worker in 0..WORKERS {
        for number in 0..chains {
            let chain = chain(number);
            let mut parent = None;
            for event in chain[..held(number, worker)].chunks(run_pages) {
                index.put(SCOPE, Worker(worker as u32), Tier::Device, parent, event)?;
                parent = event.last().copied();
                puts += 1;
                entries += event.len() as u64;
            }
            if number % 64 == 0 {
                index.sync()?;
            }
        }
    }
    index.sync()?;
    let seconds = started.elapsed().as_secs_f64();
    let taken = resident().saturating_sub(before);
    let stats = index.stats();
    println!(
        "{name}: {pages} pages, {entries} pairs of worker and page, {puts} events of up to \
         {run_pages} pages"
    );
    println!(
        "  put, synced: {:.0}k pairs/s, {:.0}k events/s",
        entries as f64 / seconds / 1e3,
        puts as f64 / seconds / 1e3
    );
    println!(
        "  bytes per page: {:.1} resident, {:.1} counted by the index, {:.1} on disk; {} sets of \
         holders",
        taken as f64 / pages as f64,
        stats.memory_bytes as f64 / pages as f64,
        stats.disk_bytes as f64 / pages as f64,
        stats.sets
    );
    let mut samples = Vec::new();
    for at in 0..20_000 {
        let chain = chain(mix(at) % chains);
        let started = Instant::now();
        let found = index.prefixes(SCOPE, &chain);
        samples.push(started.elapsed().as_secs_f64() * 1e6);
        assert_eq!(found.first().map(|prefix| prefix.pages), Some(256));
    }
    let (p50, p99) = (percentile(&mut samples, 0.5), percentile(&mut samples, 0.99));
    println!("  prefixes of 256 pages: p50 {p50:.2} us, p99 {p99:.2} us");
    let started = Instant::now();
    let mut removed = 0;
    for number in 0..chains / 4 {
        let chain = chain(number);
        for page in chain.iter().rev() {
            index.remove_blocks(SCOPE, Worker(0), Tiers::ALL, &[*page]);
            removed += 1;
        }
    }
    println!(
        "  remove_blocks of single pages: {:.0}k/s",
        f64::from(removed) / started.elapsed().as_secs_f64() / 1e3
    );
    let started = Instant::now();
    index.clear_worker(Worker(1));
    let cleared = started.elapsed().as_secs_f64() * 1e6;
    let started = Instant::now();
    index.maintain()?;
    println!(
        "  clear_worker: {cleared:.1} us, then maintain {:.1} ms",
        started.elapsed().as_secs_f64() * 1e3
    );
    index.sync()?;
    drop(index);
    let started = Instant::now();
    drop(open()?);
    println!("  open: {:.1} ms", started.elapsed().as_secs_f64() * 1e3);
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number =
        |at: usize, default| arguments.get(at).and_then(|n| n.parse().ok()).unwrap_or(default);
    let (pages, run_pages) = (number(0, 1_000_000), number(1, 16));
    let wanted = |name: &str| arguments.get(2).is_none_or(|only| only == name);
    let dir = std::env::temp_dir().join(format!("ritornello-residency-{}", std::process::id()));
    let measured = (|| {
        let go = |name: &str, open: &dyn Fn(&Path) -> Result<Box<dyn Residency>>| {
            let dir = dir.join(name);
            if wanted(name) {
                measure(name, pages, run_pages as usize, &|| open(&dir))
            } else {
                Ok(())
            }
        };
        go("run", &|dir| {
            let options = RunResidencyOptions::default();
            Ok(Box::new(RunResidency::open(Arc::new(Host), dir, options)?))
        })?;
        #[cfg(feature = "lsm")]
        go("lsm", &|dir| Ok(Box::new(LsmResidency::open(dir, &LsmResidencyOptions::default())?)))?;
        go("memory", &|_| Ok(Box::new(MemoryResidency::new())))
    })();
    let _ = std::fs::remove_dir_all(&dir);
    measured
}

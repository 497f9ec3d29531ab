//! Lower bounds of the durations of any index's operations on this machine.

use crate::bench::quantile::median;
use ritornello_index::synthetic::mix;
use ritornello_terminal::exit::Failure;
use serde::Serialize;
use std::fs::File;
use std::hint::black_box;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

/// Number of eight-byte words over which the timed reads are spread: 128 MiB, more than the caches
/// of most processors hold.
const PLACES: usize = 1 << 24;
/// Number of timed reads.
const STEPS: u32 = 1 << 20;
/// Bytes per append. [`APPENDS`] is the number of appends.
const APPEND: usize = 4096;
const APPENDS: usize = 50;

/// Lower bounds of the durations of any index's operations on this machine.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Limits {
    /// Nanoseconds of a read from memory whose address the previous read returned. A probe of an
    /// index that is in no cache of the processor takes at least one such read.
    pub memory_access_ns: f64,
    /// Median microseconds of appending 4 KiB to a file and syncing it: the minimum cost of a sync.
    pub append_sync_us: f64,
}

/// Measures both limits; the append uses the disk of `dir`.
///
/// # Errors
/// Disk errors.
pub fn measure(dir: &Path) -> Result<Limits, Failure> {
    let mut file = File::create(dir.join("appended"))?;
    let mut times = Vec::with_capacity(APPENDS);
    for _ in 0..APPENDS {
        let started = Instant::now();
        file.write_all(&[1; APPEND])?;
        file.sync_data()?;
        times.push(started.elapsed().as_secs_f64() * 1e6);
    }
    Ok(Limits { memory_access_ns: memory_access_ns(), append_sync_us: median(&times) })
}

fn memory_access_ns() -> f64 {
    // Link all words to one cycle, in an order that no prefetcher predicts, by Sattolo's shuffle.
    let mut next: Vec<u64> = (0..PLACES as u64).collect();
    for at in (1..PLACES).rev() {
        next.swap(at, (mix(at as u64) % at as u64) as usize);
    }
    let started = Instant::now();
    let mut at = 0;
    for _ in 0..STEPS {
        at = next[at as usize];
    }
    black_box(at);
    started.elapsed().as_secs_f64() * 1e9 / f64::from(STEPS)
}

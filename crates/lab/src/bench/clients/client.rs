//! A client of `bench clients`: a separate process, which reads one command per line from standard
//! input.

use super::pages::{LONG_PAGES, LONG_SET, MATCH_PAGES, MATCH_SEQUENCES, MATCH_SET, data, short};
use crate::bench::content::Keys;
use crate::bench::driver::LoadDriver;
use crate::bench::quantile::{median, quantile};
use crate::bench::shape::Shape;
use ritornello_format::Scope;
use ritornello_store::Store;
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::open;
use ritornello_terminal::print::print_stdout;
use ritornello_volume::baseline::Rate;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Number of timed probes of 256 pages, and of timed leases of 256 pages. The number of timed
/// probes of 4,096 pages is an eighth of this number. [`WARM_UP`] untimed calls precede the timed
/// calls of each kind.
const QUESTIONS: usize = 4000;
const WARM_UP: usize = 400;
/// Duration of leases; longer than the measurement of a lease.
const LEASE: Duration = Duration::from_secs(60);

/// Arguments of the client.
#[derive(Clone, Debug, clap::Args)]
pub struct ClientPart {
    /// Directory of the store
    pub dir: PathBuf,
    /// Bytes per page
    #[arg(long)]
    pub page_bytes: u64,
    /// Bytes of one set of sequences, which the command `move` puts and reads
    #[arg(long)]
    pub total: u64,
}

/// Latency of one kind of call, in microseconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Latency {
    pub p50_us: f64,
    pub p99_us: f64,
}

/// Latencies of calls for 256 stored pages, and for 4,096 stored pages.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Latencies {
    /// Probe of 256 pages.
    pub probe: Latency,
    /// Lease of 256 pages; its release is not timed.
    pub lease: Latency,
    /// Probe of 4,096 pages.
    pub long_probe: Latency,
}

/// Rate at which payload was put or read.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Transferred {
    pub gib_s: f64,
}

impl From<Rate> for Transferred {
    fn from(rate: Rate) -> Self {
        Self { gib_s: rate.gib_s() }
    }
}

/// Runs the client: opens the store of the parent process, and executes the parent's commands.
///
/// # Errors
/// Store errors; I/O errors of standard input; a failure if stored pages are not found or wrong
/// bytes are read; `Unusable` for an unknown command.
pub fn run(part: &ClientPart) -> Result<Status, Failure> {
    let node = open::existing(&part.dir)?;
    let store = node.store();
    let shape = data(part.page_bytes, part.total);
    let mut driver: Option<LoadDriver> = None;
    for line in std::io::stdin().lines() {
        let line = line?;
        let (what, set) = line.split_once(' ').unwrap_or((&line, "0"));
        let set: u32 = set.parse().unwrap_or(0);
        match what {
            "match" => answer(&latencies(store)?),
            "move" => {
                let driver = match &mut driver {
                    Some(driver) => driver,
                    none => none.insert(LoadDriver::new(&shape)?),
                };
                let put = driver.put(store, set, shape.sequences)?;
                let get = driver.get(store, set, shape.sequences)?;
                answer(&[Transferred::from(put), Transferred::from(get)]);
            }
            "busy" => work(store, &data(part.page_bytes, part.page_bytes * 64), set)?,
            _ => {
                return Err(Failure::unusable(
                    format!("unknown command of the benchmark: {line}"),
                    "",
                ));
            }
        }
    }
    node.close()?;
    Ok(Status::Fine)
}

fn answer(what: &impl Serialize) {
    print_stdout(&serde_json::to_string(what).unwrap_or_default());
}

/// Puts, gets and deletes the first sequence of `set`, and leases a sequence of small pages,
/// without pause, until the process is killed. Prints a line before the first put.
fn work(store: &Store, shape: &Shape, set: u32) -> Result<(), Failure> {
    let mut driver = LoadDriver::new(shape)?;
    let data = Keys::of(set, 0, shape.sequence_pages);
    let matched = Keys::of(MATCH_SET, set % MATCH_SEQUENCES, MATCH_PAGES);
    let scope = scope();
    answer(&true);
    loop {
        driver.put(store, set, 1)?;
        driver.get(store, set, 1)?;
        for _ in 0..64 {
            let leased = store.lease(&scope, &matched.slices(), LEASE)?;
            store.release(leased.lease)?;
        }
        store.delete(&shape.scope, &data.slices())?;
    }
}

fn scope() -> Scope {
    short(MATCH_PAGES, MATCH_SEQUENCES).scope
}

/// Measures the latencies of probes and leases in `store`, which this process owns or uses as a
/// client.
///
/// # Errors
/// Store errors; a failure if stored pages are not found.
pub fn latencies(store: &Store) -> Result<Latencies, Failure> {
    let scope = scope();
    let long = Keys::of(LONG_SET, 0, LONG_PAGES);
    let keys: Vec<Keys> =
        (0..MATCH_SEQUENCES).map(|at| Keys::of(MATCH_SET, at, MATCH_PAGES)).collect();
    let lease = std::cell::Cell::default();
    let timed = |count: usize, ask: &dyn Fn(usize) -> Result<usize, Failure>, pages: u32| {
        let mut times = Vec::with_capacity(count);
        for at in 0..count + WARM_UP {
            store.release(lease.take())?;
            let started = Instant::now();
            let found = ask(at)?;
            let took = started.elapsed().as_secs_f64() * 1e6;
            if found != pages as usize {
                let line = format!("{found} of {pages} stored pages were found");
                return Err(Failure::failed(line, "report this"));
            }
            if at >= WARM_UP {
                times.push(took);
            }
        }
        Ok(Latency { p50_us: median(&times), p99_us: quantile(&times, 0.99) })
    };
    let slices: Vec<Vec<&[u8]>> = keys.iter().map(Keys::slices).collect();
    let keys = |at: usize| slices[at % slices.len()].as_slice();
    let long = long.slices();
    Ok(Latencies {
        probe: timed(QUESTIONS, &|at| Ok(store.probe(&scope, keys(at))?), MATCH_PAGES)?,
        lease: timed(
            QUESTIONS,
            &|at| {
                let leased = store.lease(&scope, keys(at), LEASE)?;
                lease.set(leased.lease);
                Ok(leased.pages)
            },
            MATCH_PAGES,
        )?,
        long_probe: timed(QUESTIONS / 8, &|_| Ok(store.probe(&scope, &long)?), LONG_PAGES)?,
    })
}

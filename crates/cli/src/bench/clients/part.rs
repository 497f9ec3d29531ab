//! A client: a process of its own, which does what it is told, line by line.

use super::super::content::Keys;
use super::super::mover::Mover;
use super::super::report::{median, quantile};
use super::{LONG_PAGES, LONG_SET, MATCH_PAGES, MATCH_SET, MATCHED, data, short};
use crate::exit::{Failure, Status};
use crate::open;
use crate::print::say;
use ritornello_format::Scope;
use ritornello_store::Store;
use ritornello_volume::limit::Rate;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Questions of each kind, and not counted before.
const ASKED: usize = 4000;
const WARM_UP: usize = 400;
/// Lives longer than any question's answer is of use.
const LEASE: Duration = Duration::from_secs(60);

/// Of the part.
#[derive(Clone, Debug, clap::Args)]
pub struct ClientPart {
    /// The store's directory
    pub dir: PathBuf,
    /// Bytes a page
    #[arg(long)]
    pub page_bytes: u64,
    /// Bytes of a set
    #[arg(long)]
    pub total: u64,
}

/// Microseconds of one kind of question.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Latency {
    pub p50_us: f64,
    pub p99_us: f64,
}

/// Of 256 pages that are there, and of as many as sixteen such questions have.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Latencies {
    /// How many are there?
    pub probe: Latency,
    /// The same, with a lease; it is released outside the time.
    pub lease: Latency,
    /// 4,096 pages at once.
    pub long_probe: Latency,
}

/// How fast something moved.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Asked {
    pub gib_s: f64,
}

impl From<Rate> for Asked {
    fn from(rate: Rate) -> Self {
        Self { gib_s: rate.gib_s() }
    }
}

/// The client's side: opens the store of the process that started it, and obeys.
///
/// # Errors
/// Those of the store.
pub fn run(part: &ClientPart) -> Result<Status, Failure> {
    let node = open::existing(&part.dir)?;
    let store = node.store();
    let shape = data(part.page_bytes, part.total);
    let mut mover: Option<Mover> = None;
    for line in std::io::stdin().lines() {
        let line = line?;
        let (what, set) = line.split_once(' ').unwrap_or((&line, "0"));
        let set: u32 = set.parse().unwrap_or(0);
        match what {
            "match" => answer(&latencies(store)?),
            "move" => {
                let mover = match &mut mover {
                    Some(mover) => mover,
                    none => none.insert(Mover::new(&shape)?),
                };
                let put = mover.put(store, set, shape.sequences)?;
                let get = mover.get(store, set, shape.sequences)?;
                answer(&[Asked::from(put), Asked::from(get)]);
            }
            "busy" => work(store, &data(part.page_bytes, part.page_bytes * 64), set)?,
            _ => return Err(Failure::unusable(format!("what is {line}?"), "")),
        }
    }
    node.close()?;
    Ok(Status::Fine)
}

fn answer(what: &impl Serialize) {
    say(&serde_json::to_string(what).unwrap_or_default());
}

/// Matches, puts and gets without pause, until somebody ends this process.
fn work(store: &Store, shape: &super::Shape, set: u32) -> Result<(), Failure> {
    let mut mover = Mover::new(shape)?;
    let data = Keys::of(set, 0, shape.sequence_pages);
    let matched = Keys::of(MATCH_SET, set % MATCHED, MATCH_PAGES);
    let scope = scope();
    answer(&true);
    loop {
        mover.put(store, set, 1)?;
        mover.get(store, set, 1)?;
        for _ in 0..64 {
            let leased = store.lease(&scope, &matched.slices(), LEASE)?;
            store.release(leased.lease)?;
        }
        store.delete(&shape.scope, &data.slices())?;
    }
}

fn scope() -> Scope {
    short(MATCH_PAGES, MATCHED).scope
}

/// Asks `store`, from whatever process this is.
///
/// # Errors
/// Those of the store, and pages that it does not find.
pub fn latencies(store: &Store) -> Result<Latencies, Failure> {
    let scope = scope();
    let long = Keys::of(LONG_SET, 0, LONG_PAGES);
    let keys: Vec<Keys> = (0..MATCHED).map(|at| Keys::of(MATCH_SET, at, MATCH_PAGES)).collect();
    let lease = std::cell::Cell::default();
    let timed = |count: usize, ask: &dyn Fn(usize) -> Result<usize, Failure>, pages: u32| {
        let mut times = Vec::with_capacity(count);
        for at in 0..count + WARM_UP {
            store.release(lease.take())?;
            let started = Instant::now();
            let found = ask(at)?;
            let took = started.elapsed().as_secs_f64() * 1e6;
            if found != pages as usize {
                let line = format!("{found} of {pages} pages were found that are there");
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
        probe: timed(ASKED, &|at| Ok(store.probe(&scope, keys(at))?), MATCH_PAGES)?,
        lease: timed(
            ASKED,
            &|at| {
                let leased = store.lease(&scope, keys(at), LEASE)?;
                lease.set(leased.lease);
                Ok(leased.pages)
            },
            MATCH_PAGES,
        )?,
        long_probe: timed(ASKED / 8, &|_| Ok(store.probe(&scope, &long)?), LONG_PAGES)?,
    })
}

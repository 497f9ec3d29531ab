//! `bench store --steady`: a full store that evicts, compared with fresh stores in the same run.
//! The module `report` has the figures.

mod report;

use super::args::StoreArgs;
use crate::bench::content::{Keys, PageName};
use crate::bench::disk::{self, Footprint};
use crate::bench::driver::LoadDriver;
use crate::bench::quantile::{median, quantile};
use crate::bench::shape::Shape;
use crate::random::mix;
use report::{Figures, Report};
use ritornello_codec::Codec;
use ritornello_format::{Scope, ScopeSettings};
use ritornello_node::Node;
use ritornello_store::{Options, SEGMENT_BYTES, Store};
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::print::{json, print_stdout};
use ritornello_terminal::scratch::Scratch;
use ritornello_terminal::{Context, open, progress};
use ritornello_volume::BorrowedPagesMut;
use ritornello_volume::staging::Staging;
use ritornello_volume::transfer::Control;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes written to the store after it was filled, as a multiple of its capacity.
const CAPACITIES_WRITTEN: u64 = 4;
/// Divisor of the capacity: the quotient is the approximate number of bytes of one set of
/// sequences, which has at least one sequence of each page size.
const SET_SHARE: u64 = 16;
/// A sequence takes at most the capacity divided by this number, or one page if a page is longer.
/// In a production store a sequence takes a thousandth of the capacity or less.
const SEQUENCE_SHARE: u64 = 64;
/// Number of sets put into the fresh store before gets are timed: few enough that the store evicts
/// nothing.
const FRESH_SETS: u32 = 8;
/// Number of measurements of the rates of puts and gets; the report has their medians.
const ROUNDS: u32 = 5;
/// Maximum pages per get whose latency is measured. [`LATENCY_TIME`] is the duration of one
/// measurement of latencies.
const GET_PAGES: u32 = 16;
const LATENCY_TIME: Duration = Duration::from_secs(4);
/// Interval at which the allocated blocks of the full store are counted.
const SAMPLE_EVERY: Duration = Duration::from_millis(20);

/// Sequences of one page size, and their codec.
struct PageKind {
    page_bytes: u64,
    /// Maximum pages per sequence.
    pages: u32,
    /// Number of layers, and of KV heads. A page has 16 tokens and 64 bfloat16 numbers per head, so
    /// the keys and values of one head in one layer take 4 KiB of it.
    model: (u32, u32),
    codec: Codec,
}

const fn page_kind(page_bytes: u64, pages: u32, model: (u32, u32), codec: Codec) -> PageKind {
    PageKind { page_bytes, pages, model, codec }
}

const ONE_SIZE: &[PageKind] = &[page_kind(192 << 10, 256, (24, 2), Codec::Raw)];
const MIXED: &[PageKind] = &[
    page_kind(16 << 10, 512, (2, 2), Codec::Raw),
    page_kind(64 << 10, 256, (8, 2), Codec::Split),
    page_kind(192 << 10, 256, (24, 2), Codec::Int8),
    page_kind(8 << 20, 4, (64, 32), Codec::Split),
];

impl PageKind {
    fn scope(&self) -> Scope {
        Scope {
            dtype: "bfloat16".to_owned(),
            kv_scale: "none".to_owned(),
            page_tokens: 16,
            layers: (0, self.model.0),
            kv_heads: (0, self.model.1),
            head_dim: 64,
            layout: "page_first".to_owned(),
            page_bytes: None,
            ..Scope::opaque(&format!("steady {}", self.page_bytes), 1, true)
        }
    }
}

/// Measures and prints the report.
///
/// # Errors
/// If an argument is invalid, space is missing, a call fails, or wrong bytes are read.
pub fn run(context: &Context, args: &StoreArgs) -> Result<Status, Failure> {
    let started = Instant::now();
    let segment_bytes = args.segment_bytes.unwrap_or(SEGMENT_BYTES);
    let capacity = args.total;
    let dir = disk::choose(args.dir.as_deref(), 2 * capacity)?;
    let scratch = Scratch::new(&dir, "steady")?;
    let steps = progress::steps(2);
    let measure = |name: &str, page_kinds| {
        steps.set_message(name.to_owned());
        let bench = Bench::new(capacity, segment_bytes, page_kinds, &scratch.path().join(name))?;
        let figures = bench.measure()?;
        steps.inc(1);
        Ok::<_, Failure>(figures)
    };
    let (one_size, mixed) = (measure("one", ONE_SIZE)?, measure("mixed", MIXED)?);
    steps.finish_and_clear();
    drop(scratch);
    let report = Report {
        capacity_bytes: capacity,
        segment_bytes,
        dir: dir.display().to_string(),
        one_size,
        mixed,
        seconds: started.elapsed().as_secs_f64(),
    };
    if context.json {
        json(&report);
    } else {
        print_stdout(&report.show());
    }
    Ok(Status::Fine)
}

/// The measurement of one mix of page sizes, with a shape for each size.
struct Bench {
    capacity: u64,
    segment_bytes: u64,
    shapes: Vec<Shape>,
    store_dir: std::path::PathBuf,
}

type Movers = Vec<LoadDriver>;

impl Bench {
    fn new(
        capacity: u64,
        segment: u64,
        page_kinds: &[PageKind],
        store_dir: &Path,
    ) -> Result<Self, Failure> {
        let share = capacity / SET_SHARE / page_kinds.len() as u64;
        let shape = |page_kind: &PageKind| {
            let page_bytes = page_kind.page_bytes;
            let longest = share.min(capacity / SEQUENCE_SHARE);
            let pages = u64::from(page_kind.pages).min(longest / page_bytes).max(1);
            let sequences = (share / (pages * page_bytes)).max(1);
            // The casts are safe: `pages` is at most 512, and a set has far fewer than 2^32
            // sequences.
            Shape {
                scope: page_kind.scope(),
                codec: page_kind.codec,
                page_bytes,
                sequence_pages: pages as u32,
                sequences: sequences as u32,
            }
        };
        let shapes: Vec<Shape> = page_kinds.iter().map(shape).collect();
        let set: u64 = shapes.iter().map(Shape::total).sum();
        if set * u64::from(FRESH_SETS) > capacity / 4 * 3 {
            return Err(Failure::unusable(
                "--total is too small for --steady: the fresh store would evict while it is filled",
                "--total 1GiB",
            ));
        }
        let store_dir = store_dir.to_owned();
        Ok(Self { capacity, segment_bytes: segment, shapes, store_dir })
    }

    fn movers(&self) -> Result<Movers, Failure> {
        self.shapes.iter().map(LoadDriver::new).collect()
    }

    fn open(&self, name: &str) -> Result<Arc<Node>, Failure> {
        let mut options = Options::new(self.store_dir.join(name));
        options.capacity = Some(self.capacity);
        options.segment_bytes = Some(self.segment_bytes);
        options.scrub_rate = 0;
        let node = open::with(&options)?;
        for shape in &self.shapes {
            let codec = Some(shape.codec.number());
            let settings = ScopeSettings { codec, ..ScopeSettings::default() };
            node.store().configure(&shape.scope, &settings)?;
        }
        Ok(node)
    }

    fn set_bytes(&self) -> u64 {
        self.shapes.iter().map(Shape::total).sum()
    }

    fn measure(&self) -> Result<Figures, Failure> {
        let mut movers = self.movers()?;
        let full = self.open("full")?;
        let watched = self.store_dir.join("full");
        let (stop, most, samples) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        let figures = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    // A file may be removed during the count; the next sample counts again.
                    if let Ok(now) = Footprint::of(&watched) {
                        most.fetch_max(now.bytes, Ordering::Relaxed);
                        samples.fetch_add(1, Ordering::Relaxed);
                    }
                    std::thread::sleep(SAMPLE_EVERY);
                }
            });
            let figures = self.measure_against(&full, &mut movers);
            stop.store(true, Ordering::Relaxed);
            figures
        });
        let mut figures = figures?;
        figures.allocated_bytes_max = most.load(Ordering::Relaxed);
        figures.allocated_samples = samples.load(Ordering::Relaxed);
        figures.describe(&full.store().stats()?.catalog);
        full.close()?;
        std::fs::remove_dir_all(&self.store_dir)?;
        Ok(figures)
    }

    fn measure_against(&self, full: &Node, movers: &mut Movers) -> Result<Figures, Failure> {
        let mut figures = Figures {
            page_bytes: self.shapes.iter().map(|shape| shape.page_bytes).collect(),
            ..Figures::default()
        };
        let mut set = self.age(full.store(), movers, &mut figures)?;
        let fresh = self.open("fresh")?;
        for set in 0..FRESH_SETS {
            put(movers, fresh.store(), set)?;
        }
        figures.get16_p99_us_idle = self.latency(fresh.store(), FRESH_SETS - 1, None, movers, 0)?.0;
        // A number of further sets that always fits into the fresh store without an eviction: the
        // first sets take at most 75 % of the capacity ([`Bench::new`]), these at most 15 %.
        let room = (self.capacity / 20 * 3 / self.set_bytes()) as u32;
        let beside = Some(FRESH_SETS);
        let (writing, _) = self.latency(fresh.store(), FRESH_SETS - 1, beside, movers, room)?;
        figures.get16_p99_us_writing = writing;
        let (evicting, last) = self.latency(full.store(), set, Some(set + 1), movers, u32::MAX)?;
        figures.get16_p99_us_evicting = evicting;
        figures.get16_p99_ratio = evicting / writing;
        set = last;
        let (mut puts, mut gets) = (Vec::new(), Vec::new());
        let mut reads: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
        let (mut put_rates, mut get_rates) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            let empty = self.open(&format!("empty-{round}"))?;
            let new = put(movers, empty.store(), round)?;
            empty.close()?;
            std::fs::remove_dir_all(self.store_dir.join(format!("empty-{round}")))?;
            set += 1;
            let old = put(movers, full.store(), set)?;
            puts.push(old / new);
            put_rates.push(old);
            let (mut fresh_seconds, mut full_seconds) = (0.0, 0.0);
            for (driver, shape) in movers.iter_mut().zip(&self.shapes) {
                let theirs = driver.get(fresh.store(), round, shape.sequences)?;
                let ours = driver.get(full.store(), set, shape.sequences)?;
                fresh_seconds += theirs.seconds;
                full_seconds += ours.seconds;
                reads.entry(shape.page_bytes).or_default().push(ours.gib_s() / theirs.gib_s());
            }
            gets.push(fresh_seconds / full_seconds);
            get_rates.push(self.set_bytes() as f64 / full_seconds / f64::from(1 << 30));
        }
        fresh.close()?;
        std::fs::remove_dir_all(self.store_dir.join("fresh"))?;
        (figures.put_ratio, figures.put_gib_s) = (median(&puts), median(&put_rates));
        (figures.get_ratio, figures.get_gib_s) = (median(&gets), median(&get_rates));
        figures.long_read_ratio =
            reads.into_iter().map(|(size, ratios)| (size, median(&ratios))).collect();
        Ok(figures)
    }

    /// Fills the store, then writes [`CAPACITIES_WRITTEN`] times its capacity. After each set,
    /// marks two sequences of each page size as used: one from one of the latest six sets, and one
    /// that was never put. Counts these sequences, and the sequences found, in `out`. Returns the
    /// number of the last set.
    fn age(&self, store: &Store, movers: &mut Movers, out: &mut Figures) -> Result<u32, Failure> {
        let sets = (self.capacity * (CAPACITIES_WRITTEN + 1)).div_ceil(self.set_bytes()) as u32;
        for set in 0..sets {
            put(movers, store, set)?;
            let older = set - (mix(u64::from(set)) % 6).min(u64::from(set)) as u32;
            for shape in &self.shapes {
                for (set, sequence) in [(older, 0), (u32::MAX - set, 0)] {
                    let keys = Keys::of(set, sequence, shape.sequence_pages);
                    out.gets += 1;
                    out.gets_hit += u64::from(store.touch(&shape.scope, &keys.slices())? > 0);
                }
            }
        }
        Ok(sets - 1)
    }

    /// Returns the 99th percentile of gets of at most [`GET_PAGES`] pages from the set that was put
    /// last, in microseconds, and the number of this set. At the start, `set` is the set that was
    /// put last. If `beside` is given, a thread puts at most `sets` sets during the gets, starting
    /// with set `beside`; the gets end at the latest when the thread ends.
    fn latency(
        &self,
        store: &Store,
        set: u32,
        beside: Option<u32>,
        movers: &mut Movers,
        sets: u32,
    ) -> Result<(f64, u32), Failure> {
        let (latest, stop) = (AtomicU32::new(set), AtomicBool::new(false));
        let until = Instant::now() + LATENCY_TIME;
        std::thread::scope(|scope| {
            let writer = beside.map(|first| {
                let (latest, stop) = (&latest, &stop);
                scope.spawn(move || -> Result<(), Failure> {
                    let mut written = 0;
                    while !stop.load(Ordering::Relaxed) && written < sets {
                        put(movers, store, first + written)?;
                        latest.store(first + written, Ordering::Relaxed);
                        written += 1;
                    }
                    stop.store(true, Ordering::Relaxed);
                    Ok(())
                })
            });
            let mut times = Vec::new();
            let reader = Reader::new(&self.shapes);
            let read = reader.and_then(|mut reader| {
                let mut turn = 0;
                while Instant::now() < until && !stop.load(Ordering::Relaxed) {
                    let set = latest.load(Ordering::Relaxed);
                    times.extend(reader.get(store, &self.shapes, set, turn)?);
                    turn += 1;
                }
                Ok(())
            });
            stop.store(true, Ordering::Relaxed);
            if let Some(writer) = writer {
                let panicked = || Failure::failed("the putting thread panicked", "report this");
                writer.join().unwrap_or_else(|_| Err(panicked()))?;
            }
            read?;
            if times.is_empty() {
                return Err(Failure::failed("no get found all its pages", "a larger --total"));
            }
            Ok((quantile(&times, 0.99), latest.load(Ordering::Relaxed)))
        })
    }
}

/// Puts the sequences of `set` of every shape and flushes; returns the rate in GiB/s.
fn put(movers: &mut Movers, store: &Store, set: u32) -> Result<f64, Failure> {
    let (mut bytes, mut seconds) = (0, 0.0);
    for driver in movers {
        let rate = driver.put(store, set, driver.sequences())?;
        // Use the set a second time, so that no eviction policy classifies it as a scan.
        driver.touch(store, set)?;
        bytes += rate.bytes;
        seconds += rate.seconds;
    }
    Ok(bytes as f64 / seconds / f64::from(1 << 30))
}

/// Gets a few pages into aligned memory.
struct Reader {
    memory: ritornello_volume::staging::StagingBuffer,
}

impl Reader {
    fn new(shapes: &[Shape]) -> Result<Self, Failure> {
        let longest = shapes.iter().map(Shape::stride).max().unwrap_or(0) * GET_PAGES as usize;
        let memory = Staging::new(longest)?.try_take(longest);
        let none = || Failure::failed("no memory for the pages of a get", "free some memory");
        Ok(Self { memory: memory.ok_or_else(none)? })
    }

    /// Gets at most [`GET_PAGES`] consecutive pages from a random position in a random sequence of
    /// `set`. Returns the duration in microseconds, or `None` if not all pages were read.
    fn get(
        &mut self,
        store: &Store,
        shapes: &[Shape],
        set: u32,
        turn: u64,
    ) -> Result<Option<f64>, Failure> {
        let chance = mix(turn);
        let Some(shape) = shapes.get((chance % shapes.len() as u64) as usize) else {
            return Ok(None);
        };
        let sequence = ((chance >> 16) % u64::from(shape.sequences)) as u32;
        let count = GET_PAGES.min(shape.sequence_pages);
        let first = ((chance >> 32) % u64::from(shape.sequence_pages - count + 1)) as u32;
        let keys: Vec<[u8; 32]> =
            (first..first + count).map(|page| PageName { set, sequence, page }.key()).collect();
        let keys: Vec<&[u8]> = keys.iter().map(<[u8; 32]>::as_slice).collect();
        let mut pages: Vec<&mut [u8]> = self
            .memory
            .bytes_mut()
            .chunks_exact_mut(shape.stride())
            .take(count as usize)
            .map(|page| &mut page[..shape.page_bytes as usize])
            .collect();
        let target = BorrowedPagesMut::new(&mut pages);
        let started = Instant::now();
        let outcome = store.get_batch(&shape.scope, &keys, &target, &Control::default())?;
        let took = started.elapsed();
        // A get of evicted pages is not counted.
        Ok((outcome.pages == keys.len()).then_some(took.as_secs_f64() * 1e6))
    }
}

//! A full space in steady state: runs of mixed shapes are allocated, and the least recently used
//! runs are freed to make just enough room. The measure is the number of extents per run.

use super::*;
use ritornello_format::Place;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

struct Mix {
    name: &'static str,
    /// Units per page, and maximum pages of a run.
    shapes: &'static [(u32, u32)],
    /// Percentage of operations that use a stored run again instead of allocating a new run.
    reuse: u64,
    /// Maximum mean number of extents per run.
    bound: f64,
}

const MIXES: [Mix; 5] = [
    Mix { name: "192 KiB pages", shapes: &[(48, 256)], reuse: 30, bound: 1.5 },
    // An average run is half as long as a segment, so many runs do not fit the rest of a segment.
    Mix { name: "8 MiB pages", shapes: &[(2048, 32)], reuse: 30, bound: 2.5 },
    Mix { name: "192 KiB and 2 MiB", shapes: &[(48, 256), (512, 64)], reuse: 30, bound: 1.8 },
    Mix {
        name: "48 KiB to 8 MiB",
        shapes: &[(12, 256), (48, 256), (192, 128), (512, 64), (2048, 32)],
        reuse: 50,
        bound: 2.0,
    },
    Mix {
        name: "single pages and long runs",
        shapes: &[(48, 1), (48, 256), (2048, 8)],
        reuse: 30,
        bound: 1.6,
    },
];

struct Steady {
    space: Space,
    /// Runs by the value of `now` when they were allocated or last used.
    runs: BTreeMap<u64, Place>,
    now: u64,
    /// Length of a chunk, in units: see [`Steady::evict`].
    chunk: u64,
    random: u64,
    /// Time spent in the allocator.
    spent: Duration,
    /// Number of runs allocated.
    placed: u64,
    /// Number of extents of the allocated runs.
    extents: u64,
    /// Largest number of extents of one run.
    most: usize,
    /// Allocations that failed although enough units were free.
    misfits: u64,
}

impl Steady {
    fn new(segments: u32, chunk: u64) -> Self {
        let config =
            SpaceConfig { segment_units: 65_536, volumes: vec![segments], reserve_percent: 5 };
        let mut space = Space::new(config).unwrap();
        while let Some(id) = space.next_segment() {
            space.add_segment(id).unwrap();
        }
        Self {
            space,
            runs: BTreeMap::new(),
            now: 0,
            chunk,
            random: 1,
            spent: Duration::ZERO,
            placed: 0,
            extents: 0,
            most: 0,
            misfits: 0,
        }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    /// Frees up to `need` units, rounded up to whole chunks, at the end of the least recently used
    /// run. Frees the whole run if less than a chunk of its pages would remain.
    fn evict(&mut self, need: u64) {
        let (tick, mut place) = self.runs.pop_first().unwrap();
        let page = u64::from(place.page_units);
        let pages = (place.units() - u64::from(place.header_units)) / page;
        let cut = need.div_ceil(self.chunk) * self.chunk / page;
        let keep = pages.saturating_sub(cut.max(1));
        let keep = if keep * page < self.chunk { 0 } else { keep };
        let freed = place.truncate(u32::try_from(keep).unwrap());
        let start = Instant::now();
        self.space.free(&freed).unwrap();
        self.spent += start.elapsed();
        if keep > 0 {
            self.runs.insert(tick, place);
        }
    }

    fn put(&mut self, page_units: u32, pages: u32) {
        let units = 1 + u64::from(page_units) * u64::from(pages);
        let extents = loop {
            let start = Instant::now();
            let got = self.space.allocate(1, page_units, pages, Reserve::Keep);
            self.spent += start.elapsed();
            if let Some(extents) = got {
                break extents;
            }
            let short = self.space.shortfall(units, Reserve::Keep);
            self.misfits += u64::from(short == 0);
            self.evict(short.max(1));
        };
        self.placed += 1;
        self.extents += extents.len() as u64;
        self.most = self.most.max(extents.len());
        self.now += 1;
        let place = Place { header_units: 1, page_units, extents, ..Place::default() };
        self.runs.insert(self.now, place);
    }

    fn step(&mut self, mix: &Mix) {
        if self.random(100) < mix.reuse && self.now > 0 {
            let at = self.random(self.now);
            let old = self.runs.range(at..).next().map(|(tick, _)| *tick);
            if let Some(place) = old.and_then(|tick| self.runs.remove(&tick)) {
                self.now += 1;
                self.runs.insert(self.now, place);
            }
            return;
        }
        let shape = self.random(mix.shapes.len() as u64) as usize;
        let (page_units, most) = mix.shapes[shape];
        let pages = 1 + self.random(u64::from(most)) as u32;
        self.put(page_units, pages);
    }

    /// Fills the space, then replaces its contents `replacements` times. Returns the mean number of
    /// extents of the runs placed in the second half of these writes.
    fn measure(&mut self, mix: &Mix, replacements: u64) -> f64 {
        let capacity = self.space.total_units();
        let mut written = 0;
        let mut started = false;
        while written < capacity * (replacements + 1) {
            let before = self.placed;
            self.step(mix);
            if self.placed > before {
                let (_, place) = self.runs.last_key_value().unwrap();
                written += place.units();
            }
            if !started && written > capacity * (replacements + 1) / 2 {
                started = true;
                (self.placed, self.extents, self.most, self.misfits) = (0, 0, 0, 0);
                self.spent = Duration::ZERO;
            }
        }
        self.extents as f64 / self.placed as f64
    }
}

/// `SEGMENTS=400 CHUNKS=1024,4096 cargo test --release -p ritornello-volume steady -- --nocapture`
/// measures another number of segments, and other lengths of chunks (in units).
#[test]
fn runs_have_few_extents_in_steady_state() {
    let segments = std::env::var("SEGMENTS").map_or(64, |text| text.parse().unwrap());
    let chunks = std::env::var("CHUNKS").unwrap_or_else(|_| "4096".to_owned());
    for (mix, chunk) in MIXES.iter().flat_map(|mix| chunks.split(',').map(move |c| (mix, c))) {
        let mut steady = Steady::new(segments, chunk.parse().unwrap());
        let mean = steady.measure(mix, 6);
        let stats = steady.space.stats();
        println!(
            "{:28} chunk {chunk:>5}: {mean:.2} extents per run (most {}), {:.3} misfits per run, \
             {:.1} % free in {} holes, {:.2} us per run",
            mix.name,
            steady.most,
            steady.misfits as f64 / steady.placed as f64,
            100.0 * stats.free_units as f64 / stats.total_units as f64,
            stats.holes,
            steady.spent.as_secs_f64() * 1e6 / steady.placed as f64,
        );
        assert!(mean <= mix.bound, "{}: {mean:.2} extents per run", mix.name);
        assert!(
            steady.misfits * 100 <= steady.placed,
            "{}: more than 1 failed allocation for 100 runs, though enough units were free",
            mix.name
        );
    }
}

/// `cargo test --release -p ritornello-volume million -- --ignored --nocapture`
#[test]
#[ignore = "a measurement: run it by the command above"]
fn allocation_time_with_a_million_holes() {
    let mut steady = Steady::new(2048, 4096);
    for number in 0..2048 {
        let segment = SegmentId::new(0, number);
        for start in (0..65_536).step_by(128) {
            let units = 32 + steady.random(64) as u32;
            steady.space.mark(&[Extent { segment, start, units }]).unwrap();
        }
    }
    let holes = steady.space.stats().holes;
    let mut runs: Vec<Vec<Extent>> = Vec::new();
    let (mut spent, mut calls) = (Duration::ZERO, 0);
    for _ in 0..300_000 {
        let pages = 1 + steady.random(90) as u32;
        let old = steady.random(runs.len().max(1) as u64) as usize;
        let start = Instant::now();
        let extents = steady.space.allocate(1, 1, pages, Reserve::Keep);
        spent += start.elapsed();
        calls += 1;
        runs.extend(extents);
        if runs.len() > 1000 {
            let run = runs.swap_remove(old);
            let start = Instant::now();
            steady.space.free(&run).unwrap();
            spent += start.elapsed();
            calls += 1;
        }
    }
    let each = spent.as_secs_f64() * 1e6 / f64::from(calls);
    println!("{holes} holes: {each:.2} us per allocation or free");
}

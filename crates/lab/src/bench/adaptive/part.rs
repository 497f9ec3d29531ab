//! One variant of `bench adaptive`: the warm-up and the stages on one index, in this process.

use super::args::AdaptivePart;
use super::report::{Answer, Prices, Puts, Sample, Stage};
use crate::bench::index::load::{Load, SLOT, Workload};
use crate::bench::index::part;
use crate::bench::quantile::{median, quantile};
use ritornello_format::{PageHash, Place};
use ritornello_index::lsm::{LsmIndex, LsmOptions, Mode};
use ritornello_index::{NewRun, PrefixIndex, Tuning};
use ritornello_terminal::exit::{Failure, Status};
use std::hint::black_box;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Pages per put.
const RUN_PAGES: usize = 32;
/// Interval of index maintenance; [`SYNC_EVERY`] is the interval of syncs.
const MAINTAIN_EVERY: Duration = Duration::from_millis(20);
const SYNC_EVERY: Duration = Duration::from_secs(2);
/// Minimum number of samples of the index's levels and sorted runs during the warm-up and all ten
/// stages together, which take fewer than twice this number. A workload of fewer requests has a
/// sample per request.
const SAMPLES: usize = 400;
/// An interval, and a limit of processor time in seconds. If this process uses less processor time
/// than the limit within the interval, its compactions count as ended.
const IDLE: (Duration, f64) = (Duration::from_millis(250), 0.01);
/// Maximum wait for compactions to end.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Requests between two changes of the target setting, if it alternates (`swing`).
const REQUESTS_PER_SWING: usize = 200;

/// Runs a variant and prints its answer on one line.
///
/// # Errors
/// Index errors; I/O errors of `/proc/self/io` and standard output; a failure if a probe finds
/// another number of pages than were inserted.
pub fn run(args: &AdaptivePart) -> Result<Status, Failure> {
    let answer = measure(args)?;
    let line = serde_json::to_string(&answer).map_err(std::io::Error::other)?;
    let mut out = std::io::stdout();
    writeln!(out, "{line}")?;
    out.flush()?;
    Ok(Status::Fine)
}

fn measure(args: &AdaptivePart) -> Result<Answer, Failure> {
    let load = Load::new(Workload::TenStage, args.entries)?;
    let sequences: Vec<_> = (0..load.sequences).map(|number| load.sequence(number)).collect();
    let options = LsmOptions {
        mode: args.setting.map_or(Mode::Adaptive, |value| Mode::Static(value.0)),
        memtable_bytes: args.memtable,
        ..LsmOptions::default()
    };
    let index = LsmIndex::open(&args.dir, &options)?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let maintain = scope.spawn(|| maintain(&index, &stop));
        let mut variant = Variant::new(args, &index, &sequences);
        let measured = variant.measure(&load);
        stop.store(true, Ordering::Relaxed);
        let maintained = maintain
            .join()
            .map_err(|_| Failure::failed("index maintenance panicked", "report this"))?;
        measured.and(maintained).map(|()| variant.answer)
    })
}

fn maintain(index: &LsmIndex, stop: &AtomicBool) -> Result<(), Failure> {
    let mut synced = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(MAINTAIN_EVERY);
        index.maintain()?;
        if synced.elapsed() >= SYNC_EVERY {
            index.sync()?;
            synced = Instant::now();
        }
    }
    Ok(())
}

/// Microseconds of the calls of one stage, or of all stages.
#[derive(Clone, Debug, Default)]
struct Times {
    probes: Vec<f64>,
    puts: Vec<f64>,
}

struct Variant<'a> {
    args: &'a AdaptivePart,
    index: &'a LsmIndex,
    sequences: &'a [(Vec<PageHash>, usize)],
    all: Times,
    /// Microseconds of the puts while the tree did not have its target setting.
    moving: Vec<f64>,
    /// Microseconds of the puts while the tree had its target setting.
    resting: Vec<f64>,
    /// Whether the tree did not have its target setting at the last [`Variant::sample`].
    is_moving: bool,
    /// Number of operations of the index at the last sample that was added to the answer.
    decided: u64,
    answer: Answer,
}

impl<'a> Variant<'a> {
    fn new(
        args: &'a AdaptivePart,
        index: &'a LsmIndex,
        sequences: &'a [(Vec<PageHash>, usize)],
    ) -> Self {
        Self {
            args,
            index,
            sequences,
            all: Times::default(),
            moving: Vec::new(),
            resting: Vec::new(),
            is_moving: false,
            decided: 0,
            answer: Answer::default(),
        }
    }

    fn measure(&mut self, load: &Load) -> Result<(), Failure> {
        let stages = &load.stages()[..self.args.stages as usize];
        let first = stages.first().map_or(0, |stage| stage.start);
        for number in 0..first {
            self.request(number, &mut Times::default(), false)?;
        }
        self.index.sync()?;
        wait_until_idle();
        for stage in stages {
            let (cpu, written, started) =
                (part::processor_seconds(), part::written()?, Instant::now());
            let mut times = Times::default();
            for number in stage.clone() {
                self.request(number, &mut times, true)?;
            }
            self.answer.stages.push(Stage {
                cpu_s: part::processor_seconds() - cpu,
                wall_s: started.elapsed().as_secs_f64(),
                written_bytes: part::written()? - written,
                requests: stage.len() as u64,
                probe_p50_us: median(&times.probes),
                probe_p99_us: quantile(&times.probes, 0.99),
                put_p50_us: median(&times.puts),
                put_p99_us: quantile(&times.puts, 0.99),
            });
            self.all.probes.append(&mut times.probes);
            self.all.puts.append(&mut times.puts);
        }
        let (cpu, written) = (part::processor_seconds(), part::written()?);
        self.index.sync()?;
        wait_until_idle();
        self.answer.owed_s = part::processor_seconds() - cpu;
        if let Some(last) = self.answer.stages.last_mut() {
            last.written_bytes += part::written()? - written;
        }
        self.sum_up(first);
        Ok(())
    }

    fn sum_up(&mut self, first: usize) {
        let puts = |times: &[f64]| Puts {
            puts: times.len() as u64,
            p50_us: median(times),
            p99_us: quantile(times, 0.99),
        };
        self.answer.moving = puts(&self.moving);
        self.answer.resting = puts(&self.resting);
        self.answer.probe_p50_us = median(&self.all.probes);
        self.answer.probe_p99_us = quantile(&self.all.probes, 0.99);
        self.answer.put_p50_us = median(&self.all.puts);
        self.answer.put_p99_us = quantile(&self.all.puts, 0.99);
        let stages = self.answer.samples.iter().filter(|sample| sample.request >= first as u64);
        let runs: Vec<u64> = stages.map(|sample| sample.sorted_runs).collect();
        self.answer.sorted_runs = runs.iter().sum::<u64>() as f64 / runs.len().max(1) as f64;
        if let Some(tuning) = self.index.tuning() {
            self.answer.rewrites = tuning.rewrites;
            let prices = tuning.prices;
            self.answer.prices = Prices {
                rewrite_ns: prices.rewrite,
                filter_ns: prices.filter,
                block_ns: prices.block,
                seek_ns: prices.seek,
            };
            self.answer.decisions = tuning.decisions.into_iter().map(Into::into).collect();
        }
    }

    /// Probes for sequence `number`, marks the runs of the pages found as used, and inserts the
    /// missing pages. Adds the durations to `times`. `counted`: the request belongs to a stage and
    /// not to the warm-up. Only such a request adds to `moving` or `resting`, and alternates the
    /// target setting.
    fn request(&mut self, number: usize, times: &mut Times, counted: bool) -> Result<(), Failure> {
        let sequences = self.sequences;
        let Some((pages, known)) = sequences.get(number) else { return Ok(()) };
        let every = (sequences.len() / SAMPLES).max(1);
        if number.is_multiple_of(every) || (self.args.swing.is_some() && number.is_multiple_of(8)) {
            self.sample(number, number.is_multiple_of(every));
        }
        if let Some(second) =
            self.args.swing.filter(|_| counted && number.is_multiple_of(REQUESTS_PER_SWING))
        {
            let is_first = (number / REQUESTS_PER_SWING).is_multiple_of(2);
            let target = self.args.setting.filter(|_| is_first).unwrap_or(second);
            self.index.set_mode(Mode::Static(target.0));
        }
        for _ in 0..self.args.probes {
            let started = Instant::now();
            let found = black_box(self.index.probe(SLOT, black_box(pages)));
            times.probes.push(started.elapsed().as_secs_f64() * 1e6);
            if found != *known {
                let line = format!("request {number}: {found} pages were found instead of {known}");
                return Err(Failure::failed(line, "report this"));
            }
        }
        for step in self.index.walk(SLOT, &&pages[..*known]) {
            self.index.touch(step.run, number as u64);
        }
        for at in (*known..pages.len()).step_by(RUN_PAGES) {
            let end = pages.len().min(at + RUN_PAGES);
            let place = Place { generation: (number << 16 | at) as u64 + 1, ..Place::default() };
            let run = NewRun {
                scope: SLOT,
                chained: true,
                parent: at.checked_sub(1).map(|before| pages[before]),
                pages: &pages[at..end],
                place: &place,
                recency: number as u64,
            };
            let started = Instant::now();
            self.index.insert(&run)?;
            let took = started.elapsed().as_secs_f64() * 1e6;
            times.puts.push(took);
            if counted {
                let kind = if self.is_moving { &mut self.moving } else { &mut self.resting };
                kind.push(took);
            }
        }
        Ok(())
    }

    /// Reads whether the tree has its target setting. If `kept` is set, also adds a sample of the
    /// tree's shape to the answer.
    fn sample(&mut self, number: usize, kept: bool) {
        let Some(tuning) = self.index.tuning() else { return };
        let Tuning { applied, target, levels, sorted_runs, decisions, operations, .. } = tuning;
        self.is_moving = applied != target;
        if !kept {
            return;
        }
        let since = self.decided;
        let decided = decisions.iter().any(|made| made.at > since && made.from != made.to);
        self.decided = operations;
        self.answer.samples.push(Sample {
            request: number as u64,
            sorted_runs,
            levels,
            ratio: applied.ratio,
            runs: applied.runs,
            decided,
        });
    }
}

/// Waits until background threads of this process are idle, at most [`TIMEOUT`].
fn wait_until_idle() {
    let started = Instant::now();
    while started.elapsed() < TIMEOUT {
        let before = part::processor_seconds();
        std::thread::sleep(IDLE.0);
        if part::processor_seconds() - before < IDLE.1 {
            return;
        }
    }
}

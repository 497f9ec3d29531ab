//! Writes and reads of `bench store`: rates of the store and of direct I/O without a store (the raw
//! disk), round by round.

use super::capacity_gain;
use super::report::{CapacityGain, EncodedRates, Machine, Moved, Raw, Report};
use crate::bench::disk::{Footprint, drop_page_cache};
use crate::bench::driver::LoadDriver;
use crate::bench::quantile::median;
use crate::bench::shape::Shape;
use indicatif::ProgressBar;
use ritornello_codec::Codec;
use ritornello_format::Error;
use ritornello_medium::Host;
use ritornello_node::Node;
use ritornello_store::Options;
use ritornello_terminal::exit::Failure;
use ritornello_terminal::open;
use ritornello_volume::baseline::{Limit, Rate};
use std::path::Path;
use std::sync::Arc;

/// Progress steps of [`measure`] per round and store; a measurement of a codec has two stores. The
/// sweep of operation sizes and depths is one further step.
pub const STEPS: u64 = 3;
/// Numbers of the sets of sequences that are put: into a new store, to fill the store, and to
/// overwrite it. Each set has different keys and contents.
const FRESH: u32 = 1;
const FILL: u32 = 2;
const STEADY: u32 = 3;

/// A rate of the store, and the rate of the raw disk in the same round.
#[derive(Clone, Copy, Debug)]
struct Pair {
    raw: Rate,
    store: Rate,
}

#[derive(Clone, Copy, Debug)]
struct Round {
    /// Bytes on disk per byte of payload.
    size: f64,
    fresh: Pair,
    steady: Pair,
    read: Pair,
    memcpy: Rate,
    memory_read: Rate,
}

/// Returns the bytes of disk that [`measure`] needs.
///
/// # Errors
/// Errors of [`Shape::capacity`].
pub fn needed(shape: &Shape, segment_bytes: u64) -> Result<u64, Failure> {
    Ok(shape.capacity(segment_bytes)? + shape.total())
}

/// Measures puts and gets of stores in `dir`, and the raw disk, in `runs` rounds; fills in the
/// report.
///
/// # Errors
/// Disk errors, store errors, too little memory, pages that the store did not keep, and wrong
/// bytes.
pub fn measure(
    shape: &Shape,
    segment_bytes: u64,
    runs: u32,
    dir: &Path,
    steps: &ProgressBar,
    report: &mut Report,
) -> Result<(), Failure> {
    steps.set_message("trying sizes and depths on the raw disk");
    let mut limit = Limit::prepare(Arc::new(Host), dir, shape.total())?;
    let (write, read) = limit.sweep()?;
    report.machine.raw_write = Some(write.into());
    report.machine.raw_read = Some(read.into());
    let mut driver = LoadDriver::new(shape)?;
    report.machine.buffers = driver.backing().word().to_owned();
    steps.inc(1);
    let (mut rounds, mut plain) = (Vec::new(), Vec::new());
    for round in 0..runs {
        let store_dir = dir.join(format!("store-{round}"));
        let is_even = round % 2 == 0;
        let mut turn = |codec, rounds: &mut Vec<Round>| {
            let bench =
                Bench { shape, codec, segment_bytes, store_dir: &store_dir, raw_first: is_even };
            rounds.push(bench.round(&mut limit, &mut driver, steps, report)?);
            std::fs::remove_dir_all(&store_dir).map_err(Failure::from)
        };
        if shape.codec == Codec::Raw {
            turn(Codec::Raw, &mut rounds)?;
        } else if is_even {
            turn(Codec::Raw, &mut plain)?;
            turn(shape.codec, &mut rounds)?;
        } else {
            turn(shape.codec, &mut rounds)?;
            turn(Codec::Raw, &mut plain)?;
        }
    }
    summarise(&rounds, report);
    drop(driver);
    if !plain.is_empty() {
        steps.set_message("filling two small stores");
        let capacity_gain = capacity_gain::measure(shape, segment_bytes, dir)?;
        report.encoded = Some(compare(&rounds, &plain, shape.codec, capacity_gain));
    }
    Ok(())
}

struct Bench<'a> {
    shape: &'a Shape,
    codec: Codec,
    segment_bytes: u64,
    store_dir: &'a Path,
    /// Whether the raw limit is measured before the store. The order alternates by round, so that a
    /// drift of the disk affects the raw limit and the store equally.
    raw_first: bool,
}

impl Bench<'_> {
    fn round(
        &self,
        limit: &mut Limit,
        driver: &mut LoadDriver,
        steps: &ProgressBar,
        report: &mut Report,
    ) -> Result<Round, Failure> {
        let options = self.options()?;
        let count = self.shape.sequences;
        steps.set_message("writing: raw, and into a new store");
        let mut node = open::with(&options)?;
        let fresh = self.pair(|| limit.write_fresh(), || driver.put(node.store(), FRESH, count))?;
        if report.files.is_none() {
            self.describe(&node, report)?;
        }
        steps.inc(1);

        steps.set_message("overwriting: raw, and in a store that was filled and cleared");
        self.fill(driver, &node)?;
        node.store().clear()?;
        let evicted = self.evicted(&node)?;
        let steady = self.pair(|| limit.write(), || driver.put(node.store(), STEADY, count))?;
        let moved = node.store().stats()?.transfer;
        let size = moved.put_stored_bytes as f64 / moved.put_bytes.max(1) as f64;
        if self.evicted(&node)? > evicted {
            return Err(Failure::failed(
                "the store is too small for this shape: it evicted pages before they were read",
                "a larger --total",
            ));
        }
        steps.inc(1);

        steps.set_message("reading: raw, and from a reopened store");
        node.close()?;
        drop(node);
        drop_page_cache(self.store_dir)?;
        node = open::with(&options)?;
        let read = self.pair(|| limit.read(), || driver.get(node.store(), STEADY, count))?;
        let (memcpy, memory_read) = (limit.memcpy(), driver.read_memory());
        node.close()?;
        steps.inc(1);
        Ok(Round { size, fresh, steady, read, memcpy, memory_read })
    }

    fn options(&self) -> Result<Options, Failure> {
        let mut options = Options::new(self.store_dir);
        options.capacity = Some(self.shape.capacity(self.segment_bytes)?);
        options.segment_bytes = Some(self.segment_bytes);
        options.codec = self.codec;
        // Turn off the scrubber, which could read a run of the reopened store during the measured
        // gets.
        options.scrub_rate = 0;
        Ok(options)
    }

    fn pair(
        &self,
        raw: impl FnOnce() -> Result<Rate, Error>,
        store: impl FnOnce() -> Result<Rate, Failure>,
    ) -> Result<Pair, Failure> {
        if self.raw_first {
            let raw = raw()?;
            Ok(Pair { raw, store: store()? })
        } else {
            let store = store()?;
            Ok(Pair { raw: raw()?, store })
        }
    }

    /// Puts until every block of the store has been written.
    fn fill(&self, driver: &mut LoadDriver, node: &Node) -> Result<(), Failure> {
        let capacity = self.shape.capacity(self.segment_bytes)?;
        let written = self.shape.total();
        let sequences = self.shape.sequences_to_fill(capacity, self.segment_bytes, written)?;
        driver.put(node.store(), FILL, sequences)?;
        Ok(())
    }

    fn evicted(&self, node: &Node) -> Result<u64, Failure> {
        let counters = node.store().stats()?.catalog.counters;
        Ok(counters.get("evicted_pages").copied().unwrap_or(0))
    }

    fn describe(&self, node: &Node, report: &mut Report) -> Result<(), Failure> {
        let stats = node.store().stats()?.catalog;
        let footprint = Footprint::of(self.store_dir)?;
        report.files = Some(footprint.files);
        report.bytes_on_disk = Some(footprint.bytes);
        report.bytes_put = Some(self.shape.total());
        report.segment_bytes = Some(stats.segment_bytes);
        let Machine { file_system, io, io_why, .. } = &mut report.machine;
        *file_system = stats.io.file_system;
        *io = stats.io.mode;
        *io_why = stats.io.warnings.join("; ");
        Ok(())
    }
}

fn summarise(rounds: &[Round], report: &mut Report) {
    let medians = |of: &dyn Fn(&Round) -> f64| median(&rounds.iter().map(of).collect::<Vec<_>>());
    report.raw = Some(Raw {
        write_gib_s: medians(&|round| round.steady.raw.gib_s()),
        write_fresh_gib_s: medians(&|round| round.fresh.raw.gib_s()),
        read_gib_s: medians(&|round| round.read.raw.gib_s()),
        memcpy_gib_s: medians(&|round| round.memcpy.gib_s()),
        write_cpu_s_per_gib: medians(&|round| round.steady.raw.cpu_s_per_gib()),
        read_cpu_s_per_gib: medians(&|round| round.read.raw.cpu_s_per_gib()),
        memory_read_cpu_s_per_gib: medians(&|round| round.memory_read.cpu_s_per_gib()),
    });
    let moved = |of: &dyn Fn(&Round) -> Pair| {
        Moved::of(&rounds.iter().map(|round| (of(round).store, of(round).raw)).collect::<Vec<_>>())
    };
    report.put_fresh = Some(moved(&|round| round.fresh));
    report.put = Some(moved(&|round| round.steady));
    report.get = Some(moved(&|round| round.read));
}

/// Compares encoded pages with raw pages, round by round.
fn compare(encoded: &[Round], plain: &[Round], codec: Codec, kept: CapacityGain) -> EncodedRates {
    let medians = |of: &dyn Fn(&Round, &Round) -> f64| {
        median(&encoded.iter().zip(plain).map(|(a, b)| of(a, b)).collect::<Vec<_>>())
    };
    let ratio = |of: fn(&Round) -> Pair| medians(&|a, b| of(a).store.gib_s() / of(b).store.gib_s());
    let cpu = |of: fn(&Round) -> Pair| {
        medians(&|a, b| of(a).store.cpu_s_per_gib() / of(b).store.cpu_s_per_gib())
    };
    EncodedRates {
        codec: codec.word().to_owned(),
        size: medians(&|a, _| a.size),
        put_ratio: ratio(|round| round.steady),
        put_fresh_ratio: ratio(|round| round.fresh),
        get_ratio: ratio(|round| round.read),
        put_cpu_ratio: cpu(|round| round.steady),
        get_cpu_ratio: cpu(|round| round.read),
        kept,
    }
}

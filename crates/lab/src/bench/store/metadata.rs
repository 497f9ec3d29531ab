//! The index part of `bench store`: probes, restart and memory of a store without payload.

use super::metadata_store::{self, PROBE_PAGES, SET};
use super::part::{Answer, ask, run_in_child};
use super::report::{MemoryMore, Probe, Report};
use crate::bench::content::{Keys, scattered};
use crate::bench::disk::drop_page_cache;
use crate::bench::quantile::{median, quantile};
use indicatif::ProgressBar;
use ritornello_format::{Error, ScopedKeys};
use ritornello_index::PrefixIndex;
use ritornello_store::Options;
use ritornello_terminal::Context;
use ritornello_terminal::exit::Failure;
use ritornello_terminal::open;
use ritornello_terminal::print::print_stderr;
use serde_json::json;
use std::ffi::OsStr;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// Progress steps of [`measure`].
pub const STEPS: u64 = 6;
/// Disk space that [`measure`] needs, in bytes per page: two checkpoints and a journal of
/// single-page runs.
pub const DISK_BYTES_PER_PAGE: u64 = 1024;
/// Number of timed probes for each figure: warm and cold, of the store and of its index.
const PROBES: usize = 20_000;
/// Sequences that warm probes alternate between.
const WARM_SEQUENCES: u32 = 4;
/// Pages per run.
const RUN_PAGES: u32 = 32;

/// Measures, in `dir`, stores of `entries` pages without payload: `runs` openings with the store's
/// files in the page cache and `runs` openings without, probes, and the memory per page. Fills in
/// `report`.
///
/// # Errors
/// Errors of the disk, of the store, and of the child processes.
pub fn measure(
    context: &Context,
    entries: u64,
    runs: u32,
    dir: &Path,
    steps: &ProgressBar,
    report: &mut Report,
) -> Result<(), Failure> {
    let bench = Bench { context, entries };
    steps.set_message("filling an index");
    let (full, empty) = (dir.join("index"), dir.join("empty"));
    let filled = bench.fill("fill", &full, entries, RUN_PAGES)?;
    let filled_empty = bench.fill("fill", &empty, 0, RUN_PAGES)?;
    // Open the store once untimed, because the first opening writes data that the fill left
    // unwritten.
    open::with(&Options::new(&full))?.close()?;
    steps.inc(1);

    steps.set_message("reopening the store");
    let warm: Vec<f64> = (0..runs).map(|_| reopen(&full)).collect::<Result<_, _>>()?;
    report.reopen_ms = Some(median(&warm));
    let cold = (0..runs).map(|_| {
        drop_page_cache(&full)?;
        reopen(&full)
    });
    report.reopen_cold_ms = Some(median(&cold.collect::<Result<Vec<_>, Failure>>()?));
    steps.inc(1);

    steps.set_message("probing");
    let mut probe = bench.probe(&full)?;
    steps.inc(1);
    steps.set_message("probing from Python");
    probe.python_p50_us = bench.python_p50(&full);
    report.probe = Some(probe);
    steps.inc(1);

    steps.set_message("memory per page");
    let store = bench.resident(&full)?;
    let opened = bench.fill("open-index", &full, entries, RUN_PAGES)?;
    std::fs::remove_dir_all(&full)?;
    let (store_empty, empty) =
        (bench.resident(&empty)?, bench.fill("open-index", &empty, 0, RUN_PAGES)?);
    report.reopen_index_ms = Some(opened.millis);
    report.memory_bytes_per_page = Some(bench.a_page(opened, empty));
    steps.inc(1);

    steps.set_message("memory per page, in one-page runs");
    let single = dir.join("single");
    let filled_single = bench.fill("fill", &single, entries, 1)?;
    let store_single = bench.resident(&single)?;
    let opened = bench.fill("open-index", &single, entries, 1)?;
    std::fs::remove_dir_all(&single)?;
    report.memory_bytes_per_page_single = Some(bench.a_page(opened, empty));
    report.memory_more = Some(MemoryMore {
        store: bench.a_page(store, store_empty),
        store_single: bench.a_page(store_single, store_empty),
        filled: bench.a_page(filled, filled_empty),
        filled_single: bench.a_page(filled_single, filled_empty),
    });
    steps.inc(1);
    Ok(())
}

struct Bench<'a> {
    context: &'a Context,
    entries: u64,
}

impl Bench<'_> {
    /// Runs the part `how` in a separate process. `fill` makes an index and reports its memory;
    /// `open-index` opens the index and reports its memory and the time to open.
    fn fill(&self, how: &str, dir: &Path, entries: u64, run_pages: u32) -> Result<Answer, Failure> {
        let (entries, pages) = (entries.to_string(), run_pages.to_string());
        let words: [&OsStr; 6] = [
            how.as_ref(),
            dir.as_ref(),
            "--entries".as_ref(),
            entries.as_ref(),
            "--run-pages".as_ref(),
            pages.as_ref(),
        ];
        run_in_child(self.context, &words)
    }

    fn resident(&self, dir: &Path) -> Result<Answer, Failure> {
        run_in_child(self.context, &["resident".as_ref(), dir.as_ref()])
    }

    fn a_page(&self, with: Answer, without: Answer) -> f64 {
        (with.resident - without.resident) as f64 / self.entries as f64
    }

    fn probe(&self, dir: &Path) -> Result<Probe, Failure> {
        let node = open::with(&Options::new(dir))?;
        let sequences = metadata_store::sequences(self.entries);
        let scope = metadata_store::scope();
        let asked = |keys: &[&[u8]]| node.store().probe(&scope, keys);
        let warm = time_warm(&asked, WARM_SEQUENCES.min(sequences))?;
        let cold = time_cold(&asked, sequences)?;
        let entries = self.entries.to_string();
        let words: [&OsStr; 4] =
            ["probe".as_ref(), dir.as_ref(), "--entries".as_ref(), entries.as_ref()];
        let through_socket = run_in_child(self.context, &words)?;
        found_all(through_socket.found)?;
        let found = node.store().stats()?.catalog.pages;
        node.close()?;
        let index = metadata_store::index(dir, self.entries, RUN_PAGES)?;
        let id = scope.id();
        let asked = |keys: &[&[u8]]| {
            Ok(index.probe(metadata_store::SLOT, &ScopedKeys { scope: &id, keys }))
        };
        let index_warm = time_warm(&asked, WARM_SEQUENCES.min(sequences))?;
        let index_cold = time_cold(&asked, sequences)?;
        Ok(Probe {
            p50_us: median(&warm),
            p99_us: quantile(&warm, 0.99),
            cold_p50_us: median(&cold),
            index_p50_us: median(&index_warm),
            index_cold_p50_us: median(&index_cold),
            python_p50_us: None,
            socket_p50_us: Some(through_socket.p50_us),
            entries: found,
            pages: PROBE_PAGES,
        })
    }

    /// Returns the median microseconds of a probe from Python; `None` without an interpreter, or if
    /// the probe fails.
    fn python_p50(&self, dir: &Path) -> Option<f64> {
        let python = self.context.python.as_ref()?;
        match ask_python(python, dir) {
            Ok(answer) => Some(answer.p50_us),
            Err(failure) => {
                print_stderr(&format!("warning: no probe from Python: {}", failure.line));
                None
            }
        }
    }
}

fn ask_python(python: &PathBuf, dir: &Path) -> Result<Answer, Failure> {
    let scope = metadata_store::scope();
    let keys = Keys::of(SET, 0, PROBE_PAGES);
    let hex = |key: &&[u8]| key.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let question = json!({
        "dir": dir,
        "scope": { "name": scope.model, "page_bytes": scope.page_bytes, "chained": scope.chained },
        "keys": keys.slices().iter().map(hex).collect::<Vec<_>>(),
    });
    let mut command = Command::new(python);
    command.args(["-m", "ritornello.bench.probe"]);
    let answer = ask(command, Some(question.to_string().as_bytes()))?;
    found_all(answer.found)?;
    Ok(answer)
}

fn reopen(dir: &Path) -> Result<f64, Failure> {
    let started = Instant::now();
    let node = open::with(&Options::new(dir))?;
    let millis = started.elapsed().as_secs_f64() * 1e3;
    node.close()?;
    Ok(millis)
}

/// A timed probe, which returns the number of leading pages present.
type Ask<'a> = &'a dyn Fn(&[&[u8]]) -> Result<usize, Error>;

fn time_warm(ask: Ask<'_>, sequences: u32) -> Result<Vec<f64>, Failure> {
    let keys: Vec<Keys> = (0..sequences).map(|s| Keys::of(SET, s, PROBE_PAGES)).collect();
    let keys: Vec<Vec<&[u8]>> = keys.iter().map(Keys::slices).collect();
    let mut times = Vec::with_capacity(PROBES);
    for (at, keys) in keys.iter().cycle().take(PROBES + PROBES / 10).enumerate() {
        let took = time(ask, keys)?;
        if at >= PROBES / 10 {
            times.push(took);
        }
    }
    Ok(times)
}

/// Times probes for sequences in scattered order, so that the index entries of a sequence are
/// probably in no cache of the processor. The keys are in these caches, as in an engine that has
/// just hashed its tokens: they are made immediately before the probe.
fn time_cold(ask: Ask<'_>, sequences: u32) -> Result<Vec<f64>, Failure> {
    (0..PROBES)
        .map(|at| {
            let keys = Keys::of(SET, scattered(at, sequences), PROBE_PAGES);
            time(ask, &keys.slices())
        })
        .collect()
}

/// Returns the microseconds of one probe, which must find all pages.
fn time(ask: Ask<'_>, keys: &[&[u8]]) -> Result<f64, Failure> {
    let started = Instant::now();
    let found = black_box(ask(black_box(keys))?);
    let took = started.elapsed().as_secs_f64() * 1e6;
    found_all(found)?;
    Ok(took)
}

fn found_all(found: usize) -> Result<(), Failure> {
    if found == PROBE_PAGES as usize {
        return Ok(());
    }
    Err(Failure::failed(
        format!("a probe found {found} of {PROBE_PAGES} stored pages"),
        "report this",
    ))
}

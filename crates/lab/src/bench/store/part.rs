//! Parts of `bench store` that run in a separate process: the command starts itself with the name
//! of the part, and reads one line of JSON.

use super::metadata_store;
use crate::bench::child::self_command;
use crate::bench::content::{Keys, scattered};
use crate::bench::quantile::median;
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::print::{print_stderr, print_stdout};
use ritornello_terminal::{Context, open};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Number of timed probes through the socket.
const PROBES: usize = 4000;
/// Uncounted probes that warm connections and caches.
const WARM_UP: usize = 200;

/// The answer of a part.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Answer {
    /// Increase of the process's resident memory while the part filled or opened the index or the
    /// store, in bytes.
    pub resident: i64,
    /// Milliseconds in which the part opened the index.
    pub millis: f64,
    /// Median microseconds of a probe.
    pub p50_us: f64,
    /// Pages found by the last probe.
    pub found: usize,
}

/// Creates a metadata-only store, and prints the increase of resident memory.
///
/// # Errors
/// File system errors and index errors.
pub fn fill(dir: &Path, entries: u64, run_pages: u32) -> Result<Status, Failure> {
    let before = resident_bytes()?;
    let index = metadata_store::fill(dir, entries, run_pages)?;
    let resident = resident_bytes()? - before;
    drop(index);
    answer(&Answer { resident, ..Answer::default() })
}

/// Opens the index of a metadata-only store, and prints the time and the increase of resident
/// memory.
///
/// # Errors
/// File system errors and index errors.
pub fn open_index(dir: &Path, entries: u64, run_pages: u32) -> Result<Status, Failure> {
    let (before, started) = (resident_bytes()?, Instant::now());
    let index = metadata_store::index(dir, entries, run_pages)?;
    let millis = started.elapsed().as_secs_f64() * 1e3;
    let resident = resident_bytes()? - before;
    drop(index);
    answer(&Answer { resident, millis, ..Answer::default() })
}

/// Opens a store, and prints the increase of resident memory.
///
/// # Errors
/// If the store cannot be opened.
pub fn resident(dir: &Path) -> Result<Status, Failure> {
    let before = resident_bytes()?;
    let node = open::existing(dir)?;
    let resident = resident_bytes()? - before;
    node.close()?;
    answer(&Answer { resident, ..Answer::default() })
}

/// Probes a store as a client, and prints the median time of a probe.
///
/// # Errors
/// Store errors.
pub fn probe(dir: &Path, entries: u64) -> Result<Status, Failure> {
    let node = open::existing(dir)?;
    let scope = metadata_store::scope();
    let sequences = metadata_store::sequences(entries);
    let mut times = Vec::with_capacity(PROBES);
    let mut found = 0;
    for at in 0..WARM_UP + PROBES {
        let sequence = scattered(at, sequences);
        let keys = Keys::of(metadata_store::SET, sequence, metadata_store::PROBE_PAGES);
        let keys = keys.slices();
        let started = Instant::now();
        found = node.store().probe(&scope, &keys)?;
        if at >= WARM_UP {
            times.push(started.elapsed().as_secs_f64() * 1e6);
        }
    }
    node.close()?;
    answer(&Answer { p50_us: median(&times), found, ..Answer::default() })
}

fn answer(answer: &Answer) -> Result<Status, Failure> {
    match serde_json::to_string(answer) {
        Ok(line) => print_stdout(&line),
        Err(error) => print_stderr(&error.to_string()),
    }
    Ok(Status::Fine)
}

/// Returns the resident bytes of this process.
fn resident_bytes() -> Result<i64, Failure> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    let pages = text.split_ascii_whitespace().nth(1).and_then(|pages| pages.parse::<i64>().ok());
    let pages = pages
        .ok_or_else(|| Failure::failed("/proc/self/statm has no resident size", "report this"))?;
    Ok(pages * rustix::param::page_size() as i64)
}

/// Runs a part in another process.
///
/// # Errors
/// If the path of this program is unknown, and any error of [`ask`].
pub fn run_in_child(context: &Context, words: &[&OsStr]) -> Result<Answer, Failure> {
    let mut command = self_command(context)?;
    command.args(words);
    ask(command, None)
}

/// Runs a command with `input` as its standard input. Returns the answer that it prints as JSON.
///
/// # Errors
/// If the command cannot be started, fails, or does not print a valid answer.
pub fn ask(mut command: Command, input: Option<&[u8]>) -> Result<Answer, Failure> {
    use std::io::Write;
    let name = command.get_program().to_string_lossy().into_owned();
    let failed = |why: String| {
        let line = format!("a process of the measurement failed: {why}");
        Failure::failed(line, "the output above, which names the cause")
    };
    command.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
    command.stdout(Stdio::piped());
    let mut child = command.spawn().map_err(|error| failed(format!("{name}: {error}")))?;
    if let (Some(input), Some(mut pipe)) = (input, child.stdin.take()) {
        // Ignore an error: a child that ended before it read its input is reported by its exit
        // status.
        let _ = pipe.write_all(input);
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        return Err(failed(format!("{name}: {}", output.status)));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| failed(format!("{name}: {error}")))
}

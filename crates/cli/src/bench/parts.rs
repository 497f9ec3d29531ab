//! Parts in a separate process: the command starts itself and reads one line of JSON.

use super::content::Keys;
use super::metadata_store;
use super::report::median;
use crate::Context;
use crate::args::PartCommand;
use crate::exit::{Failure, Status};
use crate::print::print_stdout;
use crate::{open, print};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Probes through the socket.
const PROBES: usize = 4000;
/// Uncounted probes that warm connections and caches.
const WARM_UP: usize = 200;

/// The answer of a part.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Answer {
    /// Increase of resident bytes.
    pub resident: i64,
    /// Milliseconds to open.
    pub millis: f64,
    /// Median microseconds of a probe.
    pub p50_us: f64,
    /// Pages found by a probe.
    pub found: usize,
}

/// The hidden command: runs a part and prints its answer on one line.
///
/// # Errors
/// Errors of the part.
pub fn run(part: &PartCommand) -> Result<Status, Failure> {
    let answer = match part {
        PartCommand::IndexBackend(part) => return super::index::run_part(&part.part),
        PartCommand::Adaptive(part) => return super::adaptive::run_part(part),
        PartCommand::Client(part) => return super::clients::part::run(part),
        PartCommand::Fill { dir, entries, run_pages } => {
            let before = resident()?;
            let index = metadata_store::fill(dir, *entries, *run_pages)?;
            let resident = resident()? - before;
            drop(index);
            Answer { resident, ..Answer::default() }
        }
        PartCommand::OpenIndex { dir, entries, run_pages } => {
            let (before, started) = (resident()?, Instant::now());
            let index = metadata_store::index(dir, *entries, *run_pages)?;
            let millis = started.elapsed().as_secs_f64() * 1e3;
            let resident = resident()? - before;
            drop(index);
            Answer { resident, millis, ..Answer::default() }
        }
        PartCommand::Resident { dir } => {
            let before = resident()?;
            let node = open::existing(dir)?;
            let resident = resident()? - before;
            node.close()?;
            Answer { resident, ..Answer::default() }
        }
        PartCommand::Probe { dir, entries } => probe(dir, *entries)?,
    };
    match serde_json::to_string(&answer) {
        Ok(line) => print_stdout(&line),
        Err(error) => print::print_stderr(&error.to_string()),
    }
    Ok(Status::Fine)
}

fn probe(dir: &Path, entries: u64) -> Result<Answer, Failure> {
    let node = open::existing(dir)?;
    let scope = metadata_store::scope();
    let sequences = metadata_store::sequences(entries);
    let mut times = Vec::with_capacity(PROBES);
    let mut found = 0;
    for at in 0..WARM_UP + PROBES {
        let sequence = metadata_store::scattered(at, sequences);
        let keys = Keys::of(metadata_store::SET, sequence, metadata_store::PROBE_PAGES);
        let keys = keys.slices();
        let started = Instant::now();
        found = node.store().probe(&scope, &keys)?;
        if at >= WARM_UP {
            times.push(started.elapsed().as_secs_f64() * 1e6);
        }
    }
    node.close()?;
    Ok(Answer { p50_us: median(&times), found, ..Answer::default() })
}

/// Returns the resident bytes of this process.
fn resident() -> Result<i64, Failure> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    let pages = text.split_ascii_whitespace().nth(1).and_then(|pages| pages.parse::<i64>().ok());
    let pages = pages.ok_or_else(|| Failure::failed("/proc/self/statm is not readable", ""))?;
    Ok(pages * rustix::param::page_size() as i64)
}

/// Runs a part in another process.
///
/// # Errors
/// If the process cannot be started, or fails.
pub fn run_in_child(context: &Context, words: &[&OsStr]) -> Result<Answer, Failure> {
    let mut command = self_command(context)?;
    command.args(words);
    ask(command, None)
}

/// Returns the command line that starts this program, up to the name of a part.
///
/// # Errors
/// If the program does not know its path.
pub fn self_command(context: &Context) -> Result<Command, Failure> {
    let Some((program, first)) = context.self_command.split_first() else {
        return Err(Failure::failed(
            "the path of this program is unknown",
            "this program by its full path",
        ));
    };
    let mut command = Command::new(program);
    command.args(first).args(["bench", "part"]);
    Ok(command)
}

/// Runs a command that answers with one line of JSON.
///
/// # Errors
/// If the command cannot be started, fails, or prints another answer.
pub fn ask(mut command: Command, input: Option<&[u8]>) -> Result<Answer, Failure> {
    use std::io::Write;
    let name = command.get_program().to_string_lossy().into_owned();
    let failed = |why: String| Failure::failed(format!("a part of the measurement: {why}"), "");
    command.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
    command.stdout(Stdio::piped());
    let mut child = command.spawn().map_err(|error| failed(format!("{name}: {error}")))?;
    if let (Some(input), Some(mut pipe)) = (input, child.stdin.take()) {
        // If the child does not read its input, its exit status shows details.
        let _ = pipe.write_all(input);
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        return Err(failed(format!("{name}: {}", output.status)));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| failed(format!("{name}: {error}")))
}

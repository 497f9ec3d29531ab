//! Parts that need a process of their own: this command starts itself again and reads one line.

use super::catalogue;
use super::content::Keys;
use super::report::median;
use crate::Context;
use crate::args::PartCommand;
use crate::exit::{Failure, Status};
use crate::print::say;
use crate::{open, print};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Probes through the socket.
const PROBES: usize = 4000;
/// Not counted: connections and caches come to life.
const WARM_UP: usize = 200;

/// What a part answers.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Answer {
    /// Bytes that became resident.
    pub resident: i64,
    /// Milliseconds of opening.
    pub millis: f64,
    /// Median microseconds of a probe.
    pub p50_us: f64,
    /// Pages found by a probe.
    pub found: usize,
}

/// The hidden command: does a part, and prints its answer on one line.
///
/// # Errors
/// Those of the part.
pub fn run(part: &PartCommand) -> Result<Status, Failure> {
    let answer = match part {
        PartCommand::Contest(part) => return super::contest::run_part(&part.part),
        PartCommand::Adaptive(part) => return super::adaptive::run_part(part),
        PartCommand::Client(part) => return super::clients::part::run(part),
        PartCommand::Fill { dir, entries, run_pages } => {
            let before = resident()?;
            let index = catalogue::fill(dir, *entries, *run_pages)?;
            let resident = resident()? - before;
            drop(index);
            Answer { resident, ..Answer::default() }
        }
        PartCommand::Index { dir, entries, run_pages } => {
            let (before, started) = (resident()?, Instant::now());
            let index = catalogue::index(dir, *entries, *run_pages)?;
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
        Ok(line) => say(&line),
        Err(error) => print::complain(&error.to_string()),
    }
    Ok(Status::Fine)
}

fn probe(dir: &Path, entries: u64) -> Result<Answer, Failure> {
    let node = open::existing(dir)?;
    let scope = catalogue::scope();
    let sequences = catalogue::sequences(entries);
    let mut times = Vec::with_capacity(PROBES);
    let mut found = 0;
    for at in 0..WARM_UP + PROBES {
        let sequence = catalogue::scattered(at, sequences);
        let keys = Keys::of(catalogue::SET, sequence, catalogue::PROBE_PAGES);
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

/// Resident bytes of this process.
fn resident() -> Result<i64, Failure> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    let pages = text.split_ascii_whitespace().nth(1).and_then(|pages| pages.parse::<i64>().ok());
    let pages = pages.ok_or_else(|| Failure::failed("/proc/self/statm is not readable", ""))?;
    Ok(pages * rustix::param::page_size() as i64)
}

/// Does a part in another process.
///
/// # Errors
/// If it cannot be started, or fails.
pub fn elsewhere(context: &Context, words: &[&OsStr]) -> Result<Answer, Failure> {
    let mut command = again(context)?;
    command.args(words);
    ask(command, None)
}

/// This command again, up to the words that name a part.
///
/// # Errors
/// If it does not know where it is.
pub fn again(context: &Context) -> Result<Command, Failure> {
    let Some((program, first)) = context.again.split_first() else {
        return Err(Failure::failed("this command does not know where it is", "its full path"));
    };
    let mut command = Command::new(program);
    command.args(first).args(["bench", "part"]);
    Ok(command)
}

/// Runs a command that answers with one line of JSON.
///
/// # Errors
/// If it cannot be started, fails, or says something else.
pub fn ask(mut command: Command, input: Option<&[u8]>) -> Result<Answer, Failure> {
    use std::io::Write;
    let name = command.get_program().to_string_lossy().into_owned();
    let failed = |why: String| Failure::failed(format!("a part of the measurement: {why}"), "");
    command.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
    command.stdout(Stdio::piped());
    let mut child = command.spawn().map_err(|error| failed(format!("{name}: {error}")))?;
    if let (Some(input), Some(mut pipe)) = (input, child.stdin.take()) {
        // If it does not listen, its exit status says more.
        let _ = pipe.write_all(input);
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        return Err(failed(format!("{name}: {}", output.status)));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| failed(format!("{name}: {error}")))
}

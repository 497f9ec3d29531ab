//! `ritornello explain`.

use crate::explanation_text::describe;
use crate::request_text::describe_request;
use clap::Args;
use ritornello_format::{ScopeId, parse_key};
use ritornello_node::Observed;
use ritornello_store::{
    Decision, DecisionMemory, EXPLAINED_KEYS_MAX, Explanation, RequestExplanation,
};
use ritornello_terminal::Context;
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::open;
use ritornello_terminal::print::{count, json, print_stdout};
use serde::Serialize;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Arguments of `explain`.
#[derive(Debug, Args)]
#[command(after_help = "\
The command asks the process that owns the store, also while an engine uses the store, and prints
one line for consecutive keys with the same answer. It never owns the store. The owner remembers
evictions, removals, damage, refusals and abandoned puts since it opened the store, of at most the
last 524,288 pages, and the newest decisions of engines, at most 8 MiB.

--request prints at most 16 decisions about the request, the decision that reached the owner last
first, and explains the pages of that decision as they are now. ID is the id that the engine
returned, such as chatcmpl-..., or the engine's own id of the request. Decisions reach the owner
after about 2 seconds. vLLM records them, also with its own offloading; for SGLang and LMCache use
--keys.

`ritornello stat DIR` lists the largest scopes. Keys are the engine's block hashes, in the order of
the prompt; `Store.keys` in Python lists those that are stored.

Answers in --json: hit, behind_missing, not_yet_visible, absent_volume, evicted, removed, damaged,
refused, abandoned, other_scope, unknown. Outcomes of decisions: loaded, declined, missed,
not_needed, too_short, waiting, not_cacheable, failed.

Exit code 0: the owner has answered. Exit code 2: no store, no owner, an invalid argument, or the
owner does not answer.

Examples:
  ritornello explain /nvme/kv --request chatcmpl-8f6c2a
  ritornello explain /nvme/kv --scope 3f8a12bc --keys prompt.txt
  ritornello explain /nvme/kv --scope 3f8a12bc --keys - --json < prompt.txt")]
pub struct ExplainArgs {
    /// The store's directory
    pub dir: PathBuf,
    /// Id that the engine returned, or the engine's own id; also finds own ids of the forms
    /// `ID-...`, `N_ID` and `N_ID-...` with a number N
    #[arg(
        long,
        value_name = "ID",
        conflicts_with_all = ["scope", "keys"],
        required_unless_present = "keys"
    )]
    pub request: Option<String>,
    /// Id of the scope, or the first 8 digits or more of the id of a scope that `stat` lists
    #[arg(long, value_name = "ID", requires = "keys")]
    pub scope: Option<String>,
    /// File of at most 4,096 keys in the order of the prompt, in hexadecimal digits, one per line;
    /// `-` for standard input
    #[arg(long, value_name = "FILE", requires = "scope")]
    pub keys: Option<PathBuf>,
}

/// Minimum digits of an abbreviated scope id. `ritornello stat` shows the first eight digits.
const ID_DIGITS_MIN: usize = 8;
/// Maximum bytes of the file of keys: 256 for each of [`EXPLAINED_KEYS_MAX`] keys. The longest key
/// has 128 digits.
const KEYS_BYTES_MAX: u64 = 1 << 20;
/// Maximum time to wait for the owner's answer. No other thread of this process asks about the
/// store, so the command can wait for a slow disk.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Serialize)]
struct Report<'a> {
    dir: &'a Path,
    scope: String,
    #[serde(flatten)]
    explanation: &'a Explanation,
}

#[derive(Serialize)]
struct RequestReport<'a> {
    dir: &'a Path,
    requests: Vec<RequestEntry<'a>>,
    #[serde(flatten)]
    memory: &'a DecisionMemory,
}

#[derive(Serialize)]
struct RequestEntry<'a> {
    request_id: &'a str,
    scope: String,
    decisions: Vec<DecisionEntry<'a>>,
    explanation: &'a Explanation,
}

#[derive(Serialize)]
struct DecisionEntry<'a> {
    outcome: &'static str,
    detail: &'a str,
    unix_seconds: f64,
    pages: u32,
    found: u32,
    loaded: u32,
    seconds_with_load: Option<f64>,
    seconds_without_load: Option<f64>,
}

impl<'a> From<&'a Decision> for DecisionEntry<'a> {
    fn from(decision: &'a Decision) -> Self {
        let seconds = |micros: u64| micros as f64 / 1e6;
        let estimate = decision.estimate;
        Self {
            outcome: decision.outcome.word(),
            detail: &decision.detail,
            unix_seconds: decision.unix_millis as f64 / 1e3,
            pages: decision.pages,
            found: decision.found,
            loaded: decision.loaded,
            seconds_with_load: estimate.map(|times| seconds(times.with_load_micros)),
            seconds_without_load: estimate.map(|times| seconds(times.without_load_micros)),
        }
    }
}

/// Prints why pages are hits or misses, or the decisions about a request.
///
/// # Errors
/// If there is no store, no process owns it, its owner does not answer, the keys cannot be read, or
/// an argument is invalid.
pub fn run(context: &Context, args: &ExplainArgs) -> Result<Status, Failure> {
    match (&args.request, &args.scope, &args.keys) {
        (None, Some(scope), Some(keys)) => explain_keys(context, &args.dir, scope, keys),
        // The request is not `None`: clap requires `--request` unless `--keys` is given.
        (request, ..) => explain_request(context, &args.dir, request.as_deref().unwrap_or("")),
    }
}

fn explain_keys(
    context: &Context,
    dir: &Path,
    scope: &str,
    keys: &Path,
) -> Result<Status, Failure> {
    let keys = read_keys(keys)?;
    let id = find_scope(dir, scope)?;
    let slices: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let explained = ritornello_node::explain(dir, id, &slices, ANSWER_TIMEOUT);
    let explained = explained.map_err(|error| open::unobserved(dir, &error))?;
    let explanation = explained.ok_or_else(|| unowned(dir))?;
    if context.json {
        json(&Report { dir, scope: id.to_string(), explanation: &explanation });
    } else {
        print_stdout(&describe(id, &explanation));
    }
    Ok(Status::Fine)
}

fn explain_request(context: &Context, dir: &Path, request: &str) -> Result<Status, Failure> {
    let explained = ritornello_node::explain_request(dir, request, ANSWER_TIMEOUT);
    let explained = explained.map_err(|error| open::unobserved(dir, &error))?;
    let RequestExplanation { requests, memory } = explained.ok_or_else(|| unowned(dir))?;
    if context.json {
        let entries = requests.iter().map(|entry| RequestEntry {
            request_id: &entry.request,
            scope: entry.scope.to_string(),
            decisions: entry.decisions.iter().map(DecisionEntry::from).collect(),
            explanation: &entry.explanation,
        });
        json(&RequestReport { dir, requests: entries.collect(), memory: &memory });
    } else {
        print_stdout(&describe_request(request, &requests, &memory));
    }
    Ok(Status::Fine)
}

/// Reads keys in hexadecimal digits, one per line, and skips empty lines. Refuses more than
/// [`EXPLAINED_KEYS_MAX`] keys or [`KEYS_BYTES_MAX`] bytes.
fn read_keys(path: &Path) -> Result<Vec<Vec<u8>>, Failure> {
    let mut text = String::new();
    // Read one byte more than a valid list may have, so that a longer list is refused and not cut.
    let most = KEYS_BYTES_MAX + 1;
    let read = if path == Path::new("-") {
        std::io::stdin().take(most).read_to_string(&mut text)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(most).read_to_string(&mut text))
    };
    read.map_err(|error| {
        let line = format!("the keys cannot be read from {}: {error}", path.display());
        Failure::unusable(line, "name a text file with one key per line, or `-`")
    })?;
    let lines = (1..).zip(text.lines().map(str::trim)).filter(|(_, line)| !line.is_empty());
    if text.len() as u64 > KEYS_BYTES_MAX || lines.clone().count() > EXPLAINED_KEYS_MAX {
        let most = count(EXPLAINED_KEYS_MAX as u64);
        let line = format!("{} has more than {most} keys or 1 MiB", path.display());
        return Err(Failure::unusable(line, "pass later keys in a second call"));
    }
    lines
        .map(|(number, line)| {
            parse_key(line).ok_or_else(|| {
                let line = format!("line {number} of the keys is not pairs of hexadecimal digits");
                Failure::unusable(line, "write each key as 16 to 128 digits, without 0x")
            })
        })
        .collect()
}

/// Returns the id `text`, or the only id with this beginning among the scopes that `stat` lists.
fn find_scope(dir: &Path, text: &str) -> Result<ScopeId, Failure> {
    if let Ok(id) = text.parse() {
        return Ok(id);
    }
    let unknown = |line: &str| {
        Failure::unusable(
            format!("--scope {text}: {line}"),
            "give all 32 digits of the id: `ritornello stat DIR --json` lists the largest scopes",
        )
    };
    if text.len() < ID_DIGITS_MIN || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(unknown("not 8 to 32 hexadecimal digits"));
    }
    let Observed::Owned(stats) = open::observed(dir)? else { return Err(unowned(dir)) };
    let begins = stats.largest_scopes.iter().filter(|scope| {
        scope.id.get(..text.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(text))
    });
    let found: Vec<ScopeId> = begins.filter_map(|scope| scope.id.parse().ok()).collect();
    match found[..] {
        [id] => Ok(id),
        [] => Err(unknown("no id of the store's largest scopes begins with these digits")),
        _ => Err(unknown("several ids begin with these digits")),
    }
}

fn unowned(dir: &Path) -> Failure {
    Failure::unusable(
        format!(
            "no process owns the store in {}, so no process knows its pages and requests",
            dir.display()
        ),
        "start the engine or `ritornello serve DIR`, and ask again after a miss",
    )
}

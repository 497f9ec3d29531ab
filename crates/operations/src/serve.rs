//! `ritornello serve`: a process that owns a store for others.

use clap::Args;
use ritornello_codec::Codec;
use ritornello_format::{Error, ErrorKind};
use ritornello_node::{Node, Role};
use ritornello_store::{CatalogStats, Durability, Options, parse_index};
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::print::{bytes, print_stdout};
use ritornello_terminal::value::{codec, size};
use ritornello_terminal::{Context, open};
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

/// Arguments of `serve`.
#[derive(Debug, Args)]
#[command(after_help = "\
A store needs no service: the first process that opens it owns it, and when the owner ends another
process takes over. With this command the owner is a process that outlives engines, with separate
memory and limits.

If another process owns the store, this command waits, and takes over when the owner ends; with
--must-own it fails instead, with exit code 2. SIGTERM, SIGINT and SIGHUP end the command: clients'
calls finish, all puts are made durable, and a client takes over. If a disk is mounted over the
directory, or the directory is replaced by another store's, this command opens the directory at the
path again. Each change of the command's role is a line on standard output: `ready`, `waiting`,
`failed`, `reopening`, `closed`; with --json one object per line.

Examples:
  ritornello serve /nvme/kv --capacity 200GiB
  ritornello serve /nvme/kv --must-own
  ritornello serve /nvme/kv --json")]
pub struct ServeArgs {
    /// The store's directory
    pub dir: PathBuf,
    /// The store's capacity: creates a missing store, resizes an existing store
    #[arg(long, value_parser = size)]
    pub capacity: Option<u64>,
    /// When a put is complete: cache (once visible) or durable
    #[arg(long, default_value = "cache")]
    pub durability: String,
    /// The index: run, lsm, or run with a memory ceiling, such as run:8GiB
    #[arg(long)]
    pub index: Option<String>,
    /// Codec of pages: raw, split, zstd, int8 or int4
    #[arg(long, default_value = "raw", value_parser = codec)]
    pub codec: Codec,
    /// Fail if another process owns the store
    #[arg(long)]
    pub must_own: bool,
}

/// Interval at which a client checks whether the owner has ended.
const OWNER_CHECK: Duration = Duration::from_millis(100);
/// Interval at which the owner checks whether a failed write or sync poisoned the store, and
/// whether the store's path leads to another place.
const HEALTH_CHECK: Duration = Duration::from_secs(1);
/// First and longest pause between attempts to open the path again.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(4));
/// Maximum number of stores that the path no longer leads to and that are still being closed. A
/// hung disk may keep a store, with its memory and files, from being closed. At this number the
/// command does not open the path again.
const LEFT_MAX: usize = 4;

/// A line of output.
#[derive(Serialize)]
struct Event<'a> {
    /// `ready`, `waiting`, `failed`, `reopening` or `closed`.
    event: &'a str,
    dir: &'a Path,
    /// Process id of the owner.
    #[serde(skip_serializing_if = "Option::is_none")]
    owner_pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    capacity_bytes: Option<u64>,
    /// Why the path cannot be opened again yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
}

impl<'a> Event<'a> {
    fn new(event: &'a str, dir: &'a Path) -> Self {
        Self { event, dir, owner_pid: None, capacity_bytes: None, reason: None }
    }
}

/// Owns a store until a signal, or waits to own it. Opens the path again when it leads to another
/// store.
///
/// # Errors
/// If an argument is invalid, signals cannot be caught, the store cannot be opened, taken over or
/// closed, or another process owns it and `--must-own` is set.
pub fn run(context: &Context, args: &ServeArgs) -> Result<Status, Failure> {
    let signals_received = signals()?;
    let options = options(args)?;
    let first = open::with(&options)?;
    let dir = first.path().to_owned();
    let mut served = Some(Served::new(first));
    let mut reopening = Reopening::default();
    loop {
        let pause = if let Some(current) = &mut served {
            let pause = current.check(context, args.must_own)?;
            if pause.is_none() {
                emit(context, &Event::new("reopening", &dir));
                reopening.begin(served.take());
            }
            pause.unwrap_or_default()
        } else {
            match reopening.open(&options) {
                Ok(node) => {
                    served = Some(Served::new(node));
                    Duration::ZERO
                }
                Err(failure) => reopening.report(context, &dir, failure),
            }
        };
        match signals_received.recv_timeout(pause) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    drop(signals_received);
    if let Some(current) = &served {
        current.node.close()?;
    }
    drop(reopening);
    emit(context, &Event::new("closed", &dir));
    Ok(Status::Fine)
}

struct Served {
    node: Arc<Node>,
    /// The role that was printed last, and whether the store had failed then.
    announced: Option<(Role, bool)>,
}

impl Served {
    fn new(node: Arc<Node>) -> Self {
        Self { node, announced: None }
    }

    /// Takes over if the owner has ended, and prints the role of this process if it changed.
    /// Returns the time until the next check; `None` if the store's path leads to another place.
    fn check(&mut self, context: &Context, must_own: bool) -> Result<Option<Duration>, Failure> {
        let node = &self.node;
        let is_left = |error: &Error| error.kind() == ErrorKind::Closed || node.is_replaced();
        let role = match node.ensure_owner() {
            Ok(_) if node.is_replaced() => return Ok(None),
            Ok(role) => role,
            Err(error) if is_left(&error) => return Ok(None),
            // The owner does not respond, so this process continues to wait. The log names the
            // owner.
            Err(error) if error.kind() == ErrorKind::Retry => Role::Client,
            Err(error) => return Err(error.into()),
        };
        // A failed store does not end the command, because the owner reopens the store
        // automatically.
        let failed = role == Role::Owner && node.problem().is_some();
        let is_news = self.announced != Some((role, failed));
        if role == Role::Client && !is_news {
            return Ok(Some(OWNER_CHECK));
        }
        let pause = if role == Role::Owner { HEALTH_CHECK } else { OWNER_CHECK };
        match node.store().stats() {
            Ok(stats) if is_news => {
                announce(context, node, (role, failed), &stats.catalog, must_own)?;
                self.announced = Some((role, failed));
            }
            Ok(_) => {}
            Err(error) if is_left(&error) => return Ok(None),
            Err(error) if must_own && is_news => return Err(Failure::unopened(&error)),
            // The owner did not answer: the next check asks it again.
            Err(_) => {}
        }
        Ok(Some(pause))
    }
}

/// Attempts to open a path that now leads to another store.
#[derive(Default)]
struct Reopening {
    /// Stores that the path no longer leads to. A background thread of each store closes it,
    /// through the descriptor of its directory.
    left: Vec<Arc<Node>>,
    /// After a failed attempt, the pause until the next attempt, and the reason for the failure.
    failed: Option<(Duration, String)>,
}

impl Reopening {
    fn begin(&mut self, left: Option<Served>) {
        self.left.extend(left.map(|served| served.node));
        self.failed = None;
    }

    fn open(&mut self, options: &Options) -> Result<Arc<Node>, Failure> {
        self.left.retain(|node| !node.is_replaced());
        if self.left.len() >= LEFT_MAX {
            return Err(Failure::failed(
                format!("{LEFT_MAX} stores are still being closed: their disks do not answer"),
                "",
            ));
        }
        open::with(options)
    }

    /// Prints a failed attempt, once per reason. Returns the time until the next attempt.
    fn report(&mut self, context: &Context, dir: &Path, failure: Failure) -> Duration {
        let pause = match &self.failed {
            Some((pause, _)) => (2 * *pause).min(PAUSES.1),
            None => PAUSES.0,
        };
        if self.failed.as_ref().is_none_or(|(_, reason)| *reason != failure.line) {
            let reason = Some(failure.line.as_str());
            emit(context, &Event { reason, ..Event::new("reopening", dir) });
        }
        self.failed = Some((pause, failure.line));
        pause
    }
}

fn options(args: &ServeArgs) -> Result<Options, Failure> {
    let mut options = Options::new(&args.dir);
    options.capacity = args.capacity;
    options.durability = Durability::parse(&args.durability)?;
    options.codec = args.codec;
    if let Some(index) = &args.index {
        let (kind, memory) = parse_index(index)?;
        (options.index, options.index_memory) = (Some(kind), memory);
    }
    Ok(options)
}

/// Returns a receiver that gets a message for each signal that ends the command. A signal after the
/// receiver is dropped ends the process immediately.
fn signals() -> Result<Receiver<()>, Failure> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let (sender, receiver) = mpsc::channel();
    std::thread::Builder::new().name("ritornello-signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            if sender.send(()).is_err() {
                let _ = signal_hook::low_level::emulate_default_handler(signal);
            }
        }
    })?;
    Ok(receiver)
}

/// Prints the role of this process, and whether its store failed.
///
/// # Errors
/// If another process owns the store and this process must own it.
fn announce(
    context: &Context,
    node: &Node,
    (role, failed): (Role, bool),
    stats: &CatalogStats,
    must_own: bool,
) -> Result<(), Failure> {
    let owner = stats.owner_pid;
    if role == Role::Client && must_own {
        return Err(Failure::unusable(
            format!("process {owner} owns the store in {}", node.path().display()),
            "the command without --must-own: it waits until that process ends",
        ));
    }
    let event = match role {
        Role::Owner if failed => "failed",
        Role::Owner => "ready",
        Role::Client => "waiting",
    };
    let (owner_pid, capacity_bytes) = (Some(owner), Some(stats.capacity_bytes));
    emit(context, &Event { owner_pid, capacity_bytes, ..Event::new(event, node.path()) });
    Ok(())
}

fn emit(context: &Context, event: &Event<'_>) {
    if context.json {
        print_stdout(&serde_json::to_string(event).unwrap_or_default());
        return;
    }
    let dir = event.dir.display();
    print_stdout(&match (event.event, event.owner_pid, event.capacity_bytes) {
        ("ready", Some(pid), Some(capacity)) => {
            format!("ready: process {pid} owns {dir}, {}", bytes(capacity))
        }
        ("waiting", Some(pid), _) => {
            format!("waiting: process {pid} owns {dir}; this process takes over when it ends")
        }
        ("failed", ..) => {
            format!(
                "failed: a write or sync of {dir} failed; the store is reopened when its disk takes writes"
            )
        }
        ("reopening", ..) => match event.reason {
            None => format!(
                "reopening: {dir} now leads to another disk or store; the old store is closed, and the path is opened again"
            ),
            Some(reason) => format!("reopening: {dir} cannot be opened yet: {reason}"),
        },
        (event, ..) => format!("{event}: {dir}"),
    });
}

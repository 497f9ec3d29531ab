//! `ritornello serve`: a process that owns a store for others.

use crate::args::ServeArgs;
use crate::exit::{Failure, Status};
use crate::print::{bytes, print_stdout};
use crate::{Context, open};
use ritornello_format::ErrorKind;
use ritornello_node::{Node, Role};
use ritornello_store::{Durability, Options, parse_index};
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

/// Interval at which a client checks whether the owner has ended.
const OWNER_CHECK: Duration = Duration::from_millis(100);
/// Interval at which the owner checks whether its last write or sync failed.
const HEALTH_CHECK: Duration = Duration::from_secs(5);

/// A line of output.
#[derive(Serialize)]
struct Event<'a> {
    /// `ready`, `waiting`, `failed` or `closed`.
    event: &'a str,
    dir: &'a Path,
    /// Process of the owner, and capacity of the store.
    #[serde(skip_serializing_if = "Option::is_none")]
    owner_pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    capacity_bytes: Option<u64>,
}

/// Owns a store until a signal, or waits to own it.
///
/// # Errors
/// If the store cannot be opened, or another process owns it and `--must-own` is set.
pub fn run(context: &Context, args: &ServeArgs) -> Result<Status, Failure> {
    let signals_received = signals()?;
    let node = open::with(&options(args)?)?;
    let mut announced = None;
    loop {
        let role = match node.ensure_owner() {
            Ok(role) => role,
            // The owner does not respond: keep waiting; the log names it.
            Err(error) if error.kind() == ErrorKind::Retry => Role::Client,
            Err(error) => return Err(error.into()),
        };
        // The owner reopens a failed store by itself.
        let failed = role == Role::Owner && node.problem().is_some();
        if announced != Some((role, failed))
            && announce(context, &node, role, failed, args.must_own)?
        {
            announced = Some((role, failed));
        }
        let pause = if role == Role::Owner { HEALTH_CHECK } else { OWNER_CHECK };
        match signals_received.recv_timeout(pause) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    drop(signals_received);
    node.close()?;
    let dir = node.path();
    emit(context, &Event { event: "closed", dir, owner_pid: None, capacity_bytes: None });
    Ok(Status::Fine)
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

/// Returns a message for each signal that ends the command. A second signal ends the process at
/// once.
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

/// Prints the role of this process; returns false if the owner did not answer.
fn announce(
    context: &Context,
    node: &Node,
    role: Role,
    failed: bool,
    must_own: bool,
) -> Result<bool, Failure> {
    let stats = match node.store().stats() {
        Ok(stats) => stats,
        Err(error) if must_own => return Err(Failure::unopened(&error)),
        Err(_) => return Ok(false),
    };
    let (owner, capacity) = (stats.catalog.owner_pid, stats.catalog.capacity_bytes);
    if role == Role::Client && must_own {
        return Err(Failure::unusable(
            format!("process {owner} owns the store in {}", node.path().display()),
            "without --must-own, to wait until it ends",
        ));
    }
    let event = match role {
        Role::Owner if failed => "failed",
        Role::Owner => "ready",
        Role::Client => "waiting",
    };
    let (owner_pid, capacity_bytes) = (Some(owner), Some(capacity));
    emit(context, &Event { event, dir: node.path(), owner_pid, capacity_bytes });
    Ok(true)
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
            format!("waiting: process {pid} owns {dir}; this one takes over when it ends")
        }
        ("failed", ..) => {
            format!(
                "failed: a write or sync of {dir} failed; it is reopened when its disk takes writes"
            )
        }
        (event, ..) => format!("{event}: {dir}"),
    });
}

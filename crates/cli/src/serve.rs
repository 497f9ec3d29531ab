//! `ritornello serve`: the same owner as any, kept alive on purpose.

use crate::args::ServeArgs;
use crate::exit::{Failure, Status};
use crate::print::{bytes, say};
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

/// While another process owns the store, this one looks so often whether it is gone.
const ATTENTION: Duration = Duration::from_millis(100);
/// While this one does, it looks so often whether its last write or sync failed.
const HEALTH: Duration = Duration::from_secs(5);

/// What there is to say.
#[derive(Serialize)]
struct Event<'a> {
    /// `ready`, `waiting`, `failed` or `closed`.
    event: &'a str,
    dir: &'a Path,
    /// The owner's process, and its capacity.
    #[serde(skip_serializing_if = "Option::is_none")]
    owner_pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    capacity_bytes: Option<u64>,
}

/// Owns a store until a signal comes, or waits to own it.
///
/// # Errors
/// Where it cannot be opened or is another's and must not be.
pub fn run(context: &Context, args: &ServeArgs) -> Result<Status, Failure> {
    let told = signals()?;
    let node = open::with(&options(args)?)?;
    let mut said = None;
    loop {
        let role = match node.ensure_owner() {
            Ok(role) => role,
            // It goes on waiting; the log says for whom.
            Err(error) if error.kind() == ErrorKind::Retry => Role::Client,
            Err(error) => return Err(error.into()),
        };
        // The owner reopens a failed store by itself.
        let failed = role == Role::Owner && node.problem().is_some();
        if said != Some((role, failed)) && announce(context, &node, role, failed, args.must_own)? {
            said = Some((role, failed));
        }
        let pause = if role == Role::Owner { HEALTH } else { ATTENTION };
        match told.recv_timeout(pause) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    drop(told);
    node.close()?;
    let dir = node.path();
    tell(context, &Event { event: "closed", dir, owner_pid: None, capacity_bytes: None });
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

/// A message for each signal that ends this. The next one ends it at once.
fn signals() -> Result<Receiver<()>, Failure> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let (tell, told) = mpsc::channel();
    std::thread::Builder::new().name("ritornello-signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            if tell.send(()).is_err() {
                let _ = signal_hook::low_level::emulate_default_handler(signal);
            }
        }
    })?;
    Ok(told)
}

/// Says what this process is; returns whether that could be found out.
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
    tell(context, &Event { event, dir: node.path(), owner_pid, capacity_bytes });
    Ok(true)
}

fn tell(context: &Context, event: &Event<'_>) {
    if context.json {
        say(&serde_json::to_string(event).unwrap_or_default());
        return;
    }
    let dir = event.dir.display();
    say(&match (event.event, event.owner_pid, event.capacity_bytes) {
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

//! Owns one store, or waits to own it, until a signal.

use super::event::{Event, emit};
use ritornello_format::{Error, ErrorKind};
use ritornello_node::{Node, Role};
use ritornello_service::StoreAccess;
use ritornello_store::{CatalogStats, Options};
use ritornello_terminal::exit::Failure;
use ritornello_terminal::{Context, open};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Interval at which a client checks whether the owner has ended.
const OWNER_CHECK: Duration = Duration::from_millis(100);
/// Interval at which the owner checks whether a failed write or sync poisoned the store, and
/// whether the store's path leads to another place.
const HEALTH_CHECK: Duration = Duration::from_secs(1);
/// Maximum time during which takeovers may fail because the store's path leads elsewhere. If the
/// process has not left the store after this time, the command ends.
const PATH_CHECK: Duration = Duration::from_secs(10);
/// First and longest pause between attempts to open the path again.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(4));
/// Maximum number of stores that the path no longer leads to and that are still being closed. A
/// hung disk may keep a store, with its memory and files, from being closed. At this number the
/// command does not open the path again.
const LEFT_MAX: usize = 4;

/// The arguments of a thread that owns one store, or waits to own it.
pub(super) struct Keeper<'a> {
    pub(super) context: &'a Context,
    pub(super) options: Options,
    pub(super) must_own: bool,
    /// Gives the HTTP service the handle with which this process has the store open.
    pub(super) access: &'a StoreAccess,
    pub(super) failed_stores: &'a FailedStores,
    /// Called once: after this process's first role in the store was printed, when the store has an
    /// owner; or when the store failed and is tried again.
    pub(super) on_open: &'a (dyn Fn() + Sync),
}

impl Keeper<'_> {
    /// Owns the store, or waits to own it, until `stop` has a message or is disconnected. Opens the
    /// path again when it leads to another store, and after a failure if the command continues
    /// without the store.
    ///
    /// # Errors
    /// If the first opening fails or a takeover fails, and [`FailedStores`] does not permit to
    /// continue; if another process owns the store and `must_own` is set; if the last closing of
    /// the store fails. A takeover that fails with `Retry` is tried again, and for [`PATH_CHECK`]
    /// also a takeover that fails because the path leads elsewhere. Later openings are tried again,
    /// too.
    pub(super) fn run(&self, stop: &Receiver<()>) -> Result<(), Failure> {
        let Self { context, options, must_own, access, .. } = self;
        let mut dir = options.dir.clone();
        let mut served: Option<Served> = None;
        let mut reopening = Reopening::default();
        let (mut is_opened, mut is_announced, mut has_failed) = (false, false, false);
        let mut announced = || {
            if !std::mem::replace(&mut is_announced, true) {
                (self.on_open)();
            }
        };
        // Without permission to continue, the failure ends the command.
        let fail = |failure: Failure, has_failed: &mut bool| {
            if !std::mem::replace(has_failed, true) && !self.failed_stores.add() {
                return Err(failure);
            }
            Ok(failure)
        };
        loop {
            let pause = if let Some(current) = &mut served {
                match current.check(context, *must_own) {
                    Ok(Some(pause)) => {
                        if current.announced.is_some() {
                            announced();
                            reopening.failed = None;
                        }
                        pause
                    }
                    Ok(None) => {
                        emit(context, &Event::of_store("reopening", &dir));
                        access.set_open(None);
                        reopening.begin(served.take());
                        Duration::ZERO
                    }
                    // A command that must own its stores does not wait for another owner.
                    Err(failure) if *must_own => return Err(failure),
                    Err(failure) => {
                        let failure = fail(failure, &mut has_failed)?;
                        // Before the close, which may wait for a disk: the service then tells why
                        // the store is unavailable.
                        access.set_failed(&failure.line);
                        let node = served.take().map(|served| served.node);
                        if let Some(Err(error)) = node.map(|node| node.close()) {
                            tracing::warn!(%error, dir = %dir.display(), "the store is not closed");
                        }
                        self.report(&mut reopening, &dir, failure)
                    }
                }
            } else {
                match reopening.open(options) {
                    Ok(node) => {
                        if !std::mem::replace(&mut is_opened, true) {
                            dir = node.path().to_owned();
                        }
                        if std::mem::take(&mut has_failed) {
                            self.failed_stores.remove();
                        }
                        access.set_open(Some(Arc::clone(&node)));
                        served = Some(Served::new(node));
                        Duration::ZERO
                    }
                    Err(failure) => {
                        let failure =
                            if is_opened { failure } else { fail(failure, &mut has_failed)? };
                        // A store that waits for its disk must not delay the start of the command.
                        announced();
                        self.report(&mut reopening, &dir, failure)
                    }
                }
            };
            match stop.recv_timeout(pause) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        access.set_open(None);
        if let Some(current) = &served {
            current.node.close()?;
        }
        drop(reopening);
        emit(context, &Event::of_store("closed", &dir));
        Ok(())
    }

    /// Prints and logs a failed attempt to open the path, and tells the service about it. Returns
    /// the time until the next attempt.
    fn report(&self, reopening: &mut Reopening, dir: &Path, failure: Failure) -> Duration {
        self.access.set_failed(&failure.line);
        reopening.report(self.context, dir, failure)
    }
}

/// The stores of a command that failed and are tried again.
pub(super) struct FailedStores {
    failed: AtomicUsize,
    /// The command ends when this number of stores has failed.
    max: usize,
}

impl FailedStores {
    pub(super) fn new(max: usize) -> Self {
        Self { failed: AtomicUsize::new(0), max }
    }

    /// Counts a store that failed. Returns whether the command continues.
    fn add(&self) -> bool {
        self.failed.fetch_add(1, Ordering::AcqRel) + 1 < self.max
    }

    /// Counts a store that no longer fails.
    fn remove(&self) {
        self.failed.fetch_sub(1, Ordering::AcqRel);
    }
}

struct Served {
    node: Arc<Node>,
    /// The role that was printed last, and whether the store had failed then.
    announced: Option<(Role, bool)>,
    /// Time since which all takeovers have failed because the path leads elsewhere.
    elsewhere_since: Option<Instant>,
}

impl Served {
    fn new(node: Arc<Node>) -> Self {
        Self { node, announced: None, elsewhere_since: None }
    }

    /// Takes over if the owner has ended, and prints the role of this process, and whether its
    /// store failed, if either changed. Returns the time until the next check; `None` if the
    /// store's path leads to another place.
    fn check(&mut self, context: &Context, must_own: bool) -> Result<Option<Duration>, Failure> {
        let node = &self.node;
        let is_left = |error: &Error| error.kind() == ErrorKind::Closed || node.is_replaced();
        let role = match node.ensure_owner() {
            Ok(_) if node.is_replaced() => return Ok(None),
            Ok(role) => role,
            Err(error) if is_left(&error) => return Ok(None),
            // No owner responds, or the store cannot be opened yet, so this process continues to
            // wait. The log has the reason at level `debug`.
            Err(error) if error.kind() == ErrorKind::Retry => Role::Client,
            // The path leads elsewhere. If a disk was mounted over the directory, or another store
            // took its place, this process leaves the store and opens the path again.
            Err(error) if error.kind() == ErrorKind::Fatal => {
                let since = self.elsewhere_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= PATH_CHECK {
                    return Err(error.into());
                }
                return Ok(Some(OWNER_CHECK));
            }
            Err(error) => return Err(error.into()),
        };
        self.elsewhere_since = None;
        // A failed store does not end the command, because the owner reopens the store
        // automatically.
        let failed = role == Role::Owner && node.problem().is_some();
        let is_news = self.announced != Some((role, failed));
        let pause = if role == Role::Owner { HEALTH_CHECK } else { OWNER_CHECK };
        // Computing statistics visits all runs, so an owner computes them only for an announcement.
        if !is_news {
            return Ok(Some(pause));
        }
        match node.store().stats() {
            Ok(stats) => {
                announce(context, node, (role, failed), &stats.catalog, must_own)?;
                self.announced = Some((role, failed));
            }
            Err(error) if is_left(&error) => return Ok(None),
            Err(error) if must_own => return Err(Failure::unopened(&error)),
            // The owner did not answer: the next check asks it again.
            Err(_) => {}
        }
        Ok(Some(pause))
    }
}

/// Attempts to open the path again, after it began to lead to another directory or to none, or
/// after an attempt failed.
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

    /// Prints a failed attempt, unless the previous attempt failed for the same reason. Returns the
    /// time until the next attempt.
    fn report(&mut self, context: &Context, dir: &Path, failure: Failure) -> Duration {
        let pause = match &self.failed {
            Some((pause, _)) => (2 * *pause).min(PAUSES.1),
            None => PAUSES.0,
        };
        if self.failed.as_ref().is_none_or(|(_, reason)| *reason != failure.line) {
            let reason = Some(failure.line.as_str());
            tracing::warn!(dir = %dir.display(), reason, "the store cannot be opened: tried again");
            emit(context, &Event { reason, ..Event::of_store("reopening", dir) });
        }
        self.failed = Some((pause, failure.line));
        pause
    }
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
    emit(context, &Event { owner_pid, capacity_bytes, ..Event::of_store(event, node.path()) });
    Ok(())
}

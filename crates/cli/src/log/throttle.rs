//! Limits repeated lines: a disk that fails would otherwise log the same warning for every page.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::process;
use std::sync::LazyLock;
use std::time::{Duration, Instant};
use tracing::callsite::Identifier;
use tracing::{Level, Metadata};

/// The limits on all lines of the process that started the log.
pub(super) static PROCESS: LazyLock<Throttle> = LazyLock::new(Throttle::new);

/// Maximum lines that one statement of the source logs within [`WINDOW`].
const LINES_MAX: u32 = 20;

/// The window of a statement begins with its first line, and again with its first line after the
/// window ends.
const WINDOW: Duration = Duration::from_secs(60);

/// Counts lines by the statement that logs them, whatever values the lines contain. Lines of the
/// levels debug and trace are not limited.
#[derive(Debug)]
pub(super) struct Throttle {
    process: u32,
    windows: Mutex<HashMap<Identifier, Window>>,
}

#[derive(Debug)]
struct Window {
    began: Instant,
    /// Lines so far, logged and omitted.
    lines: u32,
    statement: Statement,
}

/// A statement of the source that logs lines.
#[derive(Debug, Clone)]
pub(super) struct Statement {
    pub(super) level: Level,
    pub(super) target: String,
    pub(super) file: String,
    pub(super) line: u32,
}

impl Statement {
    pub(super) fn new(metadata: &Metadata<'_>) -> Self {
        Self {
            level: *metadata.level(),
            target: metadata.target().to_owned(),
            file: metadata.file().unwrap_or_default().to_owned(),
            line: metadata.line().unwrap_or_default(),
        }
    }
}

/// The lines of one statement that were not logged in one window.
#[derive(Debug)]
pub(super) struct Omitted {
    pub(super) statement: Statement,
    lines: u32,
}

impl Omitted {
    /// The text of the line that is logged in the place of the omitted lines.
    pub(super) fn message(&self) -> String {
        let Statement { file, line, .. } = &self.statement;
        format!("omitted {} further lines of {file}:{line} within a minute", self.lines)
    }
}

impl Throttle {
    fn new() -> Self {
        Self { process: process::id(), windows: Mutex::default() }
    }

    /// Returns whether to log a line of the statement `metadata` at the time `now`, and the omitted
    /// lines of all statements in windows that have ended, which are not returned again. A line of
    /// level debug or trace is always logged, and ends no windows.
    fn admit(&self, metadata: &Metadata<'_>, now: Instant) -> (bool, Vec<Omitted>) {
        if *metadata.level() > Level::INFO {
            return (true, Vec::new());
        }
        let mut windows = self.windows.lock();
        let omitted = end_windows(&mut windows, Some(now));
        let window = windows.entry(metadata.callsite()).or_insert_with(|| Window {
            began: now,
            lines: 0,
            statement: Statement::new(metadata),
        });
        window.lines = window.lines.saturating_add(1);
        (window.lines <= LINES_MAX, omitted)
    }

    /// Ends the windows that are over at `now`, or all windows if `now` is `None`. Returns their
    /// omitted lines.
    pub(super) fn take_omitted(&self, now: Option<Instant>) -> Vec<Omitted> {
        end_windows(&mut self.windows.lock(), now)
    }
}

fn end_windows(windows: &mut HashMap<Identifier, Window>, now: Option<Instant>) -> Vec<Omitted> {
    let ended = windows
        .extract_if(|_, window| now.is_none_or(|now| now.duration_since(window.began) >= WINDOW));
    let omitted = ended.map(|(_, window)| Omitted {
        statement: window.statement,
        lines: window.lines.saturating_sub(LINES_MAX),
    });
    omitted.filter(|omitted| omitted.lines > 0).collect()
}

/// Returns the omitted lines that were not returned before; none in a forked child.
pub(super) fn take_omitted() -> Vec<Omitted> {
    if PROCESS.process == process::id() { PROCESS.take_omitted(None) } else { Vec::new() }
}

/// Returns whether this process may log a line of the statement `metadata` now. Calls `report` with
/// omitted lines. In a forked child all lines may be logged: the child must not lock the windows,
/// because a thread of the parent may have held the lock during the fork.
pub(super) fn admit(metadata: &Metadata<'_>, report: impl Fn(&Omitted)) -> bool {
    if PROCESS.process != process::id() {
        return true;
    }
    let (admitted, omitted) = PROCESS.admit(metadata, Instant::now());
    omitted.iter().for_each(report);
    admitted
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing::Callsite;
    use tracing::field::FieldSet;
    use tracing::metadata::Kind;
    use tracing::subscriber::Interest;

    struct FakeCallsite(std::sync::OnceLock<Metadata<'static>>);

    impl Callsite for FakeCallsite {
        fn set_interest(&self, _: Interest) {}
        fn metadata(&self) -> &Metadata<'_> {
            self.0.get().unwrap()
        }
    }

    /// A statement of the level `level` in line `line` of a file.
    fn statement(level: Level, line: u32) -> &'static Metadata<'static> {
        let callsite: &'static FakeCallsite = Box::leak(Box::new(FakeCallsite(Default::default())));
        let fields = FieldSet::new(&[], Identifier(callsite));
        callsite.0.get_or_init(|| {
            let (file, target) = (Some("put.rs"), "ritornello_store");
            Metadata::new("event", target, level, file, Some(line), None, fields, Kind::EVENT)
        })
    }

    #[test]
    fn repeated_lines_are_omitted_and_counted_in_one_line() {
        let (throttle, start) = (Throttle::new(), Instant::now());
        let (one, other) = (statement(Level::WARN, 1), statement(Level::ERROR, 2));
        let logged = (0..LINES_MAX + 5).filter(|_| throttle.admit(one, start).0).count();
        assert_eq!(logged, LINES_MAX as usize);
        let before = start + WINDOW - Duration::from_millis(1);
        assert!(throttle.admit(other, before).0, "another statement has its own limit");
        assert!(!throttle.admit(one, before).0 && throttle.take_omitted(Some(before)).is_empty());
        let (logged, omitted) = throttle.admit(other, start + WINDOW);
        assert!(logged);
        assert_eq!(omitted[0].message(), "omitted 6 further lines of put.rs:1 within a minute");
        assert_eq!((omitted.len(), throttle.take_omitted(Some(start + WINDOW)).len()), (1, 0));
        assert!(throttle.admit(one, start + WINDOW).0, "a new window begins");
        assert!(throttle.take_omitted(Some(start + WINDOW * 3)).is_empty());
    }

    #[test]
    fn debug_lines_are_not_limited() {
        let (throttle, now, statement) =
            (Throttle::new(), Instant::now(), statement(Level::DEBUG, 3));
        assert!((0..LINES_MAX * 2).all(|_| throttle.admit(statement, now).0));
        assert!(throttle.take_omitted(None).is_empty());
    }
}

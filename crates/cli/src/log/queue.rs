//! The log of a process that embeds the store, such as an engine in Python: lines wait here until a
//! thread of the program takes them.
//!
//! A thread that logs only appends its line. It waits neither for the program's handlers of lines
//! nor for an interpreter, so the log cannot delay a transfer.

use super::print_line;
use super::throttle::{self, Omitted, PROCESS, Statement};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{mem, process, thread};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// Maximum lines that wait. While three quarters of this number wait, further lines of the levels
/// debug and trace are dropped; at this number all further lines are. Dropped lines are counted,
/// and a line with their number follows.
const WAITING_MAX: usize = 1024;

/// Interval of checks for omitted lines while no line comes.
const OMITTED_INTERVAL: Duration = Duration::from_secs(10);

/// A line of the log.
#[derive(Debug, Clone)]
pub struct Line {
    /// Severity.
    pub level: Level,
    /// The module that logged the line, such as `ritornello_store::put`.
    pub target: String,
    /// The source file.
    pub file: String,
    /// The line in the source file.
    pub line: u32,
    /// Seconds since 1970.
    pub time: f64,
    /// Name of the thread that logged the line; empty if it has none.
    pub thread: String,
    /// The event, followed by its fields as ` name=value`.
    pub message: String,
    /// The fields of the event.
    pub fields: Vec<(&'static str, String)>,
}

impl Line {
    fn new(Statement { level, target, file, line }: Statement, message: String) -> Self {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let thread = thread::current().name().unwrap_or_default().to_owned();
        Self { level, target, file, line, time, thread, message, fields: Vec::new() }
    }

    fn of_omitted(omitted: &Omitted) -> Self {
        Self::new(omitted.statement.clone(), omitted.message())
    }

    fn of_event(event: &Event<'_>) -> Self {
        let mut text = EventText::default();
        event.record(&mut text);
        for (name, value) in &text.fields {
            let _ = write!(text.message, " {name}={value}");
        }
        Self { fields: text.fields, ..Self::new(Statement::new(event.metadata()), text.message) }
    }

    fn print(&self) {
        print_line(&format!("{} {}: {}", self.level, self.target, self.message));
    }
}

/// The message and the fields of an event.
#[derive(Default)]
struct EventText {
    message: String,
    fields: Vec<(&'static str, String)>,
}

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            name => self.fields.push((name, format!("{value:?}"))),
        }
    }

    // Without this method, strings would be quoted.
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}

/// Lines that wait to be taken. The queue ends with the first call of [`LineQueue::close`], and in
/// a forked child, which lacks the thread that takes lines: lines then go to standard error. A
/// child takes no lock of the queue, because a lock that a thread of the parent held during the
/// fork stays locked forever.
#[derive(Debug)]
pub struct LineQueue {
    process: u32,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    lines: VecDeque<Line>,
    /// Number of lines that did not fit, since the last line about them, and the most severe.
    dropped: u64,
    worst_dropped: Option<Line>,
    closed: bool,
}

impl State {
    /// Takes the first line; if no line waits, a line about lines that did not fit.
    fn pop(&mut self) -> Option<Line> {
        self.lines.pop_front().or_else(|| {
            let worst = self.worst_dropped.take()?;
            let dropped = mem::take(&mut self.dropped);
            let message =
                format!("dropped {dropped} lines of the log: this line names the most severe");
            Some(Line { message, fields: Vec::new(), ..worst })
        })
    }
}

impl LineQueue {
    pub(super) fn new() -> Self {
        Self { process: process::id(), state: Mutex::default(), changed: Condvar::new() }
    }

    fn is_forked(&self) -> bool {
        self.process != process::id()
    }

    fn push(&self, line: Line) {
        if self.is_forked() {
            return line.print();
        }
        let mut state = self.state.lock();
        if state.closed {
            drop(state);
            return line.print();
        }
        let most = if line.level > Level::INFO { WAITING_MAX / 4 * 3 } else { WAITING_MAX };
        if state.lines.len() < most {
            state.lines.push_back(line);
        } else {
            state.dropped += 1;
            if state.worst_dropped.as_ref().is_none_or(|worst| line.level < worst.level) {
                state.worst_dropped = Some(line);
            }
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Waits for the next line, and returns it; `None` if the queue is closed and empty, and in a
    /// forked child. If `throttle` omitted lines of a statement within a minute, a line with their
    /// number comes after this minute: before the next line of level info or more severe, or at the
    /// end of 10 seconds without a line.
    #[must_use]
    pub fn take(&self) -> Option<Line> {
        if self.is_forked() {
            return None;
        }
        let mut state = self.state.lock();
        loop {
            let line = state.pop();
            if line.is_some() || state.closed {
                return line;
            }
            if self.changed.wait_for(&mut state, OMITTED_INTERVAL).timed_out() {
                let omitted = PROCESS.take_omitted(Some(Instant::now()));
                state.lines.extend(omitted.iter().map(Line::of_omitted));
            }
        }
    }

    /// Makes later lines go to standard error, and [`LineQueue::take`] return without waiting.
    pub fn close(&self) {
        if !self.is_forked() {
            self.state.lock().closed = true;
            self.changed.notify_all();
        }
    }

    /// Closes the queue, and prints the lines that wait.
    pub fn print_waiting(&self) {
        self.close();
        while let Some(line) = self.take() {
            line.print();
        }
    }
}

/// Appends the lines of events to a queue.
pub(super) struct QueueLayer(pub(super) &'static LineQueue);

impl<S: Subscriber> Layer<S> for QueueLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let queue = self.0;
        if throttle::admit(event.metadata(), |omitted| queue.push(Line::of_omitted(omitted))) {
            queue.push(Line::of_event(event));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::prelude::*;

    /// Runs `log`, whose lines go to the returned queue.
    fn queue_of(log: impl FnOnce()) -> &'static LineQueue {
        let queue = Box::leak(Box::new(LineQueue::new()));
        let subscriber = tracing_subscriber::registry().with(QueueLayer(queue));
        tracing::subscriber::with_default(subscriber, log);
        queue
    }

    #[test]
    fn lines_have_message_and_fields() {
        let path = std::path::Path::new("/disk");
        let queue = queue_of(|| {
            tracing::warn!(path = %path.display(), pages = 3, word = "two words", "removed pages");
        });
        let line = queue.take().unwrap();
        assert_eq!(line.message, "removed pages path=/disk pages=3 word=two words");
        let fields = [("path", "/disk"), ("pages", "3"), ("word", "two words")];
        assert_eq!(line.fields, fields.map(|(name, value)| (name, value.to_owned())));
        assert_eq!((line.level, &*line.file), (Level::WARN, file!()));
        assert_eq!(line.target, module_path!());
        assert!(line.time > 1e9);
        queue.close();
        assert!(queue.take().is_none());
    }

    #[test]
    fn full_queue_counts_dropped_lines() {
        let debug_max = WAITING_MAX / 4 * 3;
        let queue = queue_of(|| {
            (0..debug_max + 7).for_each(|at| tracing::debug!("line {at}"));
            tracing::warn!("warned");
        });
        let error = queue_of(|| tracing::error!("failed")).take().unwrap();
        (0..WAITING_MAX - debug_max).for_each(|_| queue.push(error.clone()));
        queue.close();
        let lines: Vec<_> = std::iter::from_fn(|| queue.take()).collect();
        assert_eq!(lines[debug_max - 1].message, format!("line {}", debug_max - 1));
        assert_eq!((&*lines[debug_max].message, lines.len()), ("warned", WAITING_MAX + 1));
        let last = &lines[WAITING_MAX];
        assert_eq!(last.message, "dropped 8 lines of the log: this line names the most severe");
        assert_eq!(last.level, Level::ERROR);
    }

    #[test]
    fn closed_queue_returns_waiting_lines_then_none() {
        let queue = queue_of(|| tracing::info!("before"));
        queue.close();
        assert_eq!(queue.take().unwrap().message, "before");
        assert!(queue.take().is_none());
    }
}

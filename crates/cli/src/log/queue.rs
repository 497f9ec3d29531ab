//! The log of a process that embeds the store, such as an engine in Python: lines wait here until a
//! thread of the program takes them.
//!
//! A thread that logs only appends its line. It waits neither for the program's handlers of lines
//! nor for an interpreter, so the log cannot delay a transfer.

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

/// Maximum lines that wait. Further lines are counted, and a line with their number is appended.
const WAITING_MAX: usize = 1024;

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

    /// Writes the line to standard error in one system call. Takes no lock: in a forked child, a
    /// lock stays locked forever if another thread of the parent held it during the fork.
    fn print(&self) {
        let text = format!("{} {}: {}\n", self.level, self.target, self.message);
        let _ = rustix::io::write(rustix::stdio::stderr(), text.as_bytes());
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
/// a forked child, which lacks the thread that takes lines: lines then go to standard error.
#[derive(Debug)]
pub struct LineQueue {
    process: u32,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    lines: VecDeque<Line>,
    /// Number of lines that did not fit, since lines were last taken, and the first of them.
    dropped: u64,
    first_dropped: Option<Line>,
    closed: bool,
}

impl LineQueue {
    pub(super) fn new() -> Self {
        Self { process: process::id(), state: Mutex::default(), changed: Condvar::new() }
    }

    fn push(&self, line: Line) {
        // Compared first: the child of a fork must not lock `state`.
        if self.process != process::id() {
            return line.print();
        }
        let mut state = self.state.lock();
        if state.closed {
            drop(state);
            return line.print();
        }
        if state.lines.len() == WAITING_MAX {
            state.dropped += 1;
            state.first_dropped.get_or_insert(line);
        } else {
            state.lines.push_back(line);
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Returns the waiting lines, after at most `timeout`, and then lines about omitted lines.
    /// Returns an empty list if no line came, and `None` if the queue is closed and empty.
    #[must_use]
    pub fn take(&self, timeout: Duration) -> Option<Vec<Line>> {
        let mut state = self.state.lock();
        if state.lines.is_empty() && !state.closed {
            self.changed.wait_for(&mut state, timeout);
        }
        let mut lines = Vec::from(mem::take(&mut state.lines));
        let ended = if state.closed { None } else { Some(Instant::now()) };
        let omitted = PROCESS.take_omitted(ended);
        lines.extend(omitted.iter().map(Line::of_omitted));
        if let Some(first) = state.first_dropped.take() {
            let dropped = mem::take(&mut state.dropped);
            let message = format!("dropped {dropped} lines of the log, the first from here");
            lines.push(Line { message, fields: Vec::new(), ..first });
        }
        (!lines.is_empty() || !state.closed).then_some(lines)
    }

    /// Makes later lines go to standard error, and [`LineQueue::take`] return without waiting.
    pub fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
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
        let lines = queue.take(Duration::ZERO).unwrap();
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0].message, "removed pages path=/disk pages=3 word=two words");
        let fields = [("path", "/disk"), ("pages", "3"), ("word", "two words")];
        assert_eq!(lines[0].fields, fields.map(|(name, value)| (name, value.to_owned())));
        assert_eq!((lines[0].level, &*lines[0].file), (Level::WARN, file!()));
        assert_eq!(lines[0].target, module_path!());
        assert!(lines[0].time > 1e9);
        assert_eq!(queue.take(Duration::ZERO).map(|lines| lines.len()), Some(0));
    }

    #[test]
    fn full_queue_counts_dropped_lines() {
        let queue = queue_of(|| (0..WAITING_MAX + 7).for_each(|at| tracing::debug!("line {at}")));
        let lines = queue.take(Duration::ZERO).unwrap();
        assert_eq!(lines.len(), WAITING_MAX + 1);
        assert_eq!(lines[WAITING_MAX - 1].message, format!("line {}", WAITING_MAX - 1));
        let dropped = "dropped 7 lines of the log, the first from here";
        assert_eq!(lines[WAITING_MAX].message, dropped);
        assert!(queue.take(Duration::ZERO).unwrap().is_empty());
    }

    #[test]
    fn closed_queue_gives_its_lines_and_ends() {
        let queue = queue_of(|| tracing::info!("before"));
        queue.close();
        let start = std::time::Instant::now();
        let long = Duration::from_secs(100);
        assert_eq!(queue.take(long).unwrap()[0].message, "before");
        assert!(queue.take(long).is_none());
        assert!(start.elapsed() < long);
    }
}

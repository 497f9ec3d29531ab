//! Collects the log lines of one thread.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};
use tracing::field::Field;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

struct Collector(Arc<Mutex<Vec<String>>>);

impl Subscriber for Collector {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut line = event.metadata().level().to_string();
        event.record(&mut |field: &Field, value: &dyn Debug| {
            write!(line, " {field}={value:?}").unwrap();
        });
        self.0.lock().unwrap().push(line);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Returns the lines that this thread logs during `work`: level, and fields with their values.
pub fn log_lines(work: impl FnOnce()) -> Vec<String> {
    let lines = Arc::default();
    tracing::subscriber::with_default(Collector(Arc::clone(&lines)), work);
    let lines = lines.lock().unwrap();
    lines.clone()
}

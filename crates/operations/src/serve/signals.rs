//! Signals that end the command.

use ritornello_terminal::exit::Failure;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;

/// An event that ends the command.
pub(super) enum Happening {
    /// A signal arrived.
    Signal,
    /// A thread that owned a store, or waited to own it, ended.
    StoreEnded,
}

/// Whether the command is ending: a signal then ends the process immediately.
#[derive(Default)]
pub(super) struct Ending(AtomicBool);

impl Ending {
    /// Marks the command as ending. Returns whether it was ending already.
    pub(super) fn begin(&self) -> bool {
        self.0.swap(true, Ordering::AcqRel)
    }
}

/// Sends [`Happening::Signal`] when the first signal that ends the command arrives. A later signal,
/// or a signal while the command ends for another reason, ends the process immediately.
///
/// # Errors
/// If signals cannot be caught.
pub(super) fn forward(sender: Sender<Happening>, ending: Arc<Ending>) -> Result<(), Failure> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    std::thread::Builder::new().name("ritornello-signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            if ending.begin() || sender.send(Happening::Signal).is_err() {
                let _ = signal_hook::low_level::emulate_default_handler(signal);
            }
        }
    })?;
    Ok(())
}

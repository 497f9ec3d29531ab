//! Calls that wait for a disk, each on a separate thread, so that the caller can give up.
//!
//! A process cannot cancel an operation that the kernel holds. The background threads of a store
//! serve all its volumes, so none of them may wait for the disk of a single volume: the thread of
//! the call waits, and ends when the disk answers. The disk of the store's own directory, which has
//! journal and manifest, is an exception: without it no put succeeds anyway, so background threads
//! may wait for it. Their waits for sync rounds end after 10 seconds, in the search for the new
//! place of a moved run after 30 seconds, and for the sync of moved runs after 60 seconds.

use super::StoreCore;
use parking_lot::Mutex;
use ritornello_format::{Error, Extent, Place, Result};
use ritornello_volume::segments::Segments;
use ritornello_volume::transfer::{Control, VerifiedRun};
use std::collections::BTreeMap;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Interval between checks whether the caller gives up: no event says that a disk does not answer.
const CHECK: Duration = Duration::from_millis(50);
/// Maximum time that a caller waits for a call on the files of one volume.
const VOLUME_TIMEOUT: Duration = Duration::from_secs(10);

/// The calls of a store whose threads may still run.
#[derive(Default)]
pub(crate) struct DiskCalls {
    /// Counts the calls that change the store's files: each call holds a clone.
    writing: Arc<()>,
    /// The last call on each volume that its caller gave up; the call may still run.
    given_up: Mutex<BTreeMap<u8, Weak<()>>>,
    /// Destinations of runs, by the copy that its caller gave up: the disk may write to these
    /// extents until the copy ends.
    copies: Mutex<Vec<(Weak<()>, Vec<Extent>)>>,
}

impl DiskCalls {
    /// Counts a call that changes the store's files until the returned clone is dropped. A close
    /// waits for counted calls.
    pub(super) fn begin_writing(&self) -> Arc<()> {
        Arc::clone(&self.writing)
    }

    /// Whether a call that changes the store's files still runs.
    pub(super) fn are_writing(&self) -> bool {
        Arc::strong_count(&self.writing) > 1
    }

    /// Waits until no call changes the store's files. Returns false if one still does at `until`.
    pub(super) fn end_writing(&self, until: Instant) -> bool {
        while self.are_writing() {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(CHECK);
        }
        true
    }
}

impl StoreCore {
    /// Runs `work` on the core on a separate thread, and waits until the work ends or `give_up`
    /// returns true. Returns `None` if the caller gave up, in which case the work continues, or if
    /// the work panicked. Without background threads, as in deterministic tests, the work runs on
    /// the calling thread.
    pub(super) fn beside<T: Send + 'static>(
        &self,
        name: &str,
        work: impl FnOnce(&Self) -> T + Send + 'static,
        give_up: impl Fn() -> bool,
    ) -> Option<T> {
        let writing = Arc::clone(&self.disk_calls.writing);
        let Some(core) = self.this.upgrade().filter(|_| self.options.background_threads) else {
            return Some(work(self));
        };
        let work = move || {
            let done = work(&core);
            drop((core, writing));
            done
        };
        call(name, work, give_up)
    }

    /// Verifies a run. Gives up when a volume of the run has stalled.
    ///
    /// # Errors
    /// Errors of [`Segments::verify_run`]; `Retry` if the caller gave up.
    pub(super) fn verify_stored(&self, place: &Place, control: &Control) -> Result<VerifiedRun> {
        if !self.options.background_threads {
            return self.segments.verify_run(place, control);
        }
        let (segments, from, control) =
            (Arc::clone(&self.segments), place.clone(), control.clone());
        let verify = move || segments.verify_run(&from, &control);
        call("ritornello-verify", verify, || self.segments.is_stalled(place))
            .unwrap_or_else(|| Err(stalled()))
    }

    /// Copies a run from the place `from` to the place `to`, without the pages that are false in
    /// `live`. Returns the checksum of the copy's header. Gives up when a volume of `from` or `to`
    /// has stalled, and returns `None`: the extents of `to` are freed after the copy has ended.
    pub(super) fn copy_stored(
        &self,
        from: &Place,
        to: &Place,
        live: &[bool],
        control: &Control,
    ) -> Option<Result<u64>> {
        if !self.options.background_threads {
            return Some(self.segments.copy_run(from, to, live, control));
        }
        let running = Arc::new(());
        let copy = {
            let held = (Arc::clone(&running), Arc::clone(&self.disk_calls.writing));
            let (segments, control) = (Arc::clone(&self.segments), control.clone());
            let (from, to, live) = (from.clone(), to.clone(), live.to_vec());
            move || {
                let copied = segments.copy_run(&from, &to, &live, &control);
                drop(held);
                copied
            }
        };
        let is_stalled = || self.segments.is_stalled(from) || self.segments.is_stalled(to);
        let copied = call("ritornello-move", copy, is_stalled);
        if copied.is_none() {
            let ended = Arc::downgrade(&running);
            drop(running);
            self.disk_calls.copies.lock().push((ended, to.extents.clone()));
        }
        copied
    }

    /// Frees the destinations of the given-up copies that have ended.
    pub(super) fn free_given_up_copies(&self) {
        let mut copies = self.disk_calls.copies.lock();
        if copies.is_empty() {
            return;
        }
        let (ended, running): (Vec<_>, Vec<_>) =
            copies.drain(..).partition(|(call, _)| call.strong_count() == 0);
        *copies = running;
        drop(copies);
        let mut state = self.state.lock();
        ended.iter().for_each(|(_, extents)| state.space.free(extents));
    }

    /// Runs `work` on the files of one volume. Gives up after [`VOLUME_TIMEOUT`].
    ///
    /// # Errors
    /// Errors of `work`; `Retry` if the caller gave up, or if an earlier call on the volume was
    /// given up and has not ended.
    pub(super) fn on_volume<T: Send + 'static>(
        &self,
        volume: u8,
        work: impl FnOnce(&Segments) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        if !self.options.background_threads {
            return work(&self.segments);
        }
        let is_hanging = |call: &Weak<()>| call.strong_count() > 0;
        if self.disk_calls.given_up.lock().get(&volume).is_some_and(is_hanging) {
            return Err(unanswered());
        }
        let running = Arc::new(());
        let work = {
            let held = (Arc::clone(&running), Arc::clone(&self.disk_calls.writing));
            let segments = Arc::clone(&self.segments);
            move || {
                let done = work(&segments);
                drop(held);
                done
            }
        };
        let until = Instant::now() + VOLUME_TIMEOUT;
        call("ritornello-volume", work, || Instant::now() >= until).unwrap_or_else(|| {
            self.disk_calls.given_up.lock().insert(volume, Arc::downgrade(&running));
            Err(unanswered())
        })
    }
}

/// Runs `work` on a separate thread, and waits until the work ends or `give_up` returns true.
/// Returns `None` if the caller gave up, or if the work panicked. Runs the work on the calling
/// thread if no thread can be started.
fn call<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
    give_up: impl Fn() -> bool,
) -> Option<T> {
    let work = Arc::new(Mutex::new(Some(work)));
    let (taken, (reply, replied)) = (Arc::clone(&work), channel());
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        let work = taken.lock().take();
        // A failed send means that the caller has given up.
        let _ = work.map(|work| reply.send(work()));
    });
    if thread.is_err() {
        let work = work.lock().take();
        return work.map(|work| work());
    }
    loop {
        match replied.recv_timeout(CHECK) {
            Ok(done) => return Some(done),
            Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) if give_up() => return None,
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// Error for a run on a volume that has stalled.
fn stalled() -> Error {
    Error::retry("a run is on a volume that completes no operation: check the disk of the volume")
}

/// Error for a call on a volume whose disk has not answered.
fn unanswered() -> Error {
    Error::retry("the disk of the volume does not answer: check the disk")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn given_up_call_continues_and_panic_gives_no_result() {
        assert_eq!(call("test", || 7, || false), Some(7));
        let (release, released) = channel::<()>();
        let ended = Arc::new(AtomicBool::new(false));
        let work = {
            let ended = Arc::clone(&ended);
            move || {
                let _ = released.recv();
                ended.store(true, Ordering::Release);
            }
        };
        assert_eq!(call("test", work, || true), None);
        assert!(!ended.load(Ordering::Acquire));
        drop(release);
        while !ended.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        assert_eq!(call("test", || -> u32 { panic!("a bug") }, || false), None);
    }
}

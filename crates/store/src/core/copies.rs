//! Keeps copies of the manifest and the scope registry in the volumes outside the store's
//! directory, in the background.
//!
//! In a store with background threads each copy is written by a separate thread, so a volume that
//! stalls delays only its copy. A close first waits up to a second for copies in progress, and only
//! then begins the last copies: here a volume that stalls delays the copies of all volumes. A copy
//! that failed, or is out of date, matters only if the store's directory is lost.

use super::StoreCore;
use parking_lot::{Condvar, Mutex};
use ritornello_format::{Manifest, VolumeMarker, VolumeRecord};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Minimum pause between two copies to one volume: changes within the pause are copied together.
/// The copy at close does not wait for the end of a pause.
const COPY_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum average bytes per second that the copies before the close write to one volume: a longer
/// copy is followed by a longer pause.
const COPY_RATE: usize = 1 << 20;
/// Pause after a copy that failed.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum time that closing waits for copies.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The copies of the manifest and the scope registry in the volumes.
#[derive(Default)]
pub(crate) struct Copies {
    progress: Arc<Progress>,
}

#[derive(Default)]
struct Progress {
    volumes: Mutex<BTreeMap<u8, VolumeCopy>>,
    ended: Condvar,
}

/// The copy in one volume.
#[derive(Default)]
struct VolumeCopy {
    /// The version that was written last; `None` if none was, or if the last write failed.
    written: Option<Version>,
    /// Whether a thread is writing the copy.
    busy: bool,
    /// The thread that writes the copy, or wrote it last; `None` once it is joined.
    thread: Option<JoinHandle<()>>,
    /// The copy is not written again before this time, except at close.
    not_before: Option<Instant>,
    failed: bool,
}

/// Identifies the contents of a copy: the manifest, and the state of the scope registry.
#[derive(Clone)]
struct Version {
    manifest: Arc<Manifest>,
    /// The number of changes of the registry by this owner, see
    /// [`Scopes::changes`](super::scopes::Scopes::changes).
    scopes: u64,
}

impl PartialEq for Version {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.manifest, &other.manifest) && self.scopes == other.scopes
    }
}

impl StoreCore {
    /// Starts to write the copies that are out of date. Without background threads, has written
    /// them when it returns.
    pub(super) fn refresh_copies(&self) {
        // Without background threads, as in deterministic tests, the result must not depend on
        // time, so pauses are ignored.
        let now = self.options.background_threads.then(Instant::now);
        self.start_copies(&self.shape.manifest(), now);
    }

    /// At close, writes the copies that are out of date. Stops waiting after [`CLOSE_TIMEOUT`], so
    /// the copy in a slow volume may stay out of date.
    pub(super) fn finish_copies(&self, manifest: &Arc<Manifest>) {
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        self.copies.progress.wait(deadline);
        self.start_copies(manifest, None);
        self.copies.progress.wait(deadline);
    }

    /// Starts to write the copies that are out of date. If `now` is given, skips volumes that are
    /// within a pause.
    fn start_copies(&self, manifest: &Arc<Manifest>, now: Option<Instant>) {
        if manifest.is_being_restored() {
            // Do not overwrite the copies while the store is being restored: an interrupted restore
            // begins again from them.
            return;
        }
        let version = Version { manifest: Arc::clone(manifest), scopes: self.scopes.changes() };
        let absent = self.state.lock().absence.volumes();
        let volumes = (0..=u8::MAX).zip(&manifest.volumes).filter(|(number, volume)| {
            is_outside(&self.options.dir, volume)
                && !absent.contains(number)
                && self.copies.progress.is_due(*number, &version, now)
        });
        let volumes: Vec<(u8, &VolumeRecord)> = volumes.collect();
        if volumes.is_empty() {
            return;
        }
        // The registry is locked while a change of it is written to the disk. Do not wait for the
        // lock: a later call of this function writes the copies.
        let Some(scopes) = self.scopes.table() else { return };
        let files: Arc<[Vec<u8>; 2]> = Arc::new([manifest.encode(), scopes.encode()]);
        for (number, volume) in volumes {
            let (directory, progress) =
                (self.shape.directory().clone(), Arc::clone(&self.copies.progress));
            let (files, version) = (Arc::clone(&files), version.clone());
            let dir = self.options.dir.join(&volume.dir);
            let marker = VolumeMarker { store: manifest.uuid, volume: number };
            progress.begin(number);
            let write = move || {
                let [manifest, scopes] = &*files;
                let owner = version.manifest.owner_epoch;
                let written = directory.write_copies(&dir, marker, owner, manifest, scopes);
                progress.end(number, &dir, version, manifest.len() + scopes.len(), written);
            };
            if !self.options.background_threads {
                write();
                continue;
            }
            let thread = std::thread::Builder::new().name("ritornello-copy".to_owned());
            self.copies.progress.set_thread(number, thread.spawn(write).ok());
        }
    }
}

impl Progress {
    /// Whether the copy of a volume differs from `version`, no thread is writing it, and `now` is
    /// not within a pause.
    fn is_due(&self, volume: u8, version: &Version, now: Option<Instant>) -> bool {
        let volumes = self.volumes.lock();
        volumes.get(&volume).is_none_or(|copy| {
            let pauses = now.is_some_and(|now| copy.not_before.is_some_and(|until| now < until));
            !copy.busy && !pauses && copy.written.as_ref() != Some(version)
        })
    }

    fn begin(&self, volume: u8) {
        self.volumes.lock().entry(volume).or_default().busy = true;
    }

    /// Sets the thread that writes a copy. Without a thread the copy stays out of date until a
    /// later call of [`StoreCore::start_copies`].
    fn set_thread(&self, volume: u8, thread: Option<JoinHandle<()>>) {
        let mut volumes = self.volumes.lock();
        let copy = volumes.entry(volume).or_default();
        copy.busy &= thread.is_some();
        copy.thread = thread;
    }

    fn end(&self, volume: u8, dir: &Path, version: Version, bytes: usize, written: io::Result<()>) {
        let mut volumes = self.volumes.lock();
        let copy = volumes.entry(volume).or_default();
        copy.busy = false;
        copy.written = written.is_ok().then_some(version);
        let pause = match &written {
            Ok(()) => COPY_INTERVAL.max(Duration::from_secs_f64(bytes as f64 / COPY_RATE as f64)),
            Err(_) => RETRY_INTERVAL,
        };
        copy.not_before = Some(Instant::now() + pause);
        let failed_before = std::mem::replace(&mut copy.failed, written.is_err());
        drop(volumes);
        if let Err(error) = written
            && !failed_before
        {
            tracing::warn!(
                %error, dir = %dir.display(),
                "the copies of the manifest and of the scope registry in this directory could not \
                 be written"
            );
        }
        self.ended.notify_all();
    }

    /// Waits until no thread writes a copy, at most until `deadline`.
    fn wait(&self, deadline: Instant) {
        let mut volumes = self.volumes.lock();
        while volumes.values().any(|copy| copy.busy) {
            if self.ended.wait_until(&mut volumes, deadline).timed_out() {
                break;
            }
        }
        let idle = volumes.values_mut().filter(|copy| !copy.busy);
        let ended: Vec<JoinHandle<()>> = idle.filter_map(|copy| copy.thread.take()).collect();
        drop(volumes);
        for thread in ended {
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

/// Whether the volume's directory is outside the store's directory `dir`, so that its copy survives
/// the loss of `dir`. Compares paths only, because a system call could block on a hung disk.
fn is_outside(dir: &Path, volume: &VolumeRecord) -> bool {
    let path = Path::new(&volume.dir);
    path.is_absolute() && !path.starts_with(dir)
}

//! Temporary directories of commands, removed when a command succeeds or fails, and on SIGINT
//! (Ctrl-C), SIGTERM and SIGHUP.

use crate::exit::Failure;
use parking_lot::Mutex;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static LIVE: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
static GUARD: Once = Once::new();
static SERIAL: AtomicU32 = AtomicU32::new(0);

/// A private temporary directory, removed on drop.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Creates a directory in `dir`, with `what` in its name, accessible to this user only.
    ///
    /// # Errors
    /// If the directory cannot be created.
    pub fn new(dir: &Path, what: &str) -> Result<Self, Failure> {
        GUARD.call_once(watch_signals);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!(".ritornello-{what}-{}-{serial}", std::process::id()));
        LIVE.lock().push(path.clone());
        std::fs::DirBuilder::new().mode(0o700).create(&path).map_err(|error| {
            // If `path` exists already, this process did not create it and must not remove it.
            LIVE.lock().retain(|live| *live != path);
            Failure::unusable(
                format!("cannot create a directory in {}: {error}", dir.display()),
                "name a directory that can be written, or free some space",
            )
        })?;
        Ok(Self { path })
    }

    /// Returns the path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        remove(&self.path);
        LIVE.lock().retain(|path| *path != self.path);
    }
}

fn remove(path: &Path) {
    match std::fs::remove_dir_all(path) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => {
            tracing::warn!(
                %error,
                path = %path.display(),
                "a temporary directory could not be removed: remove it"
            )
        }
    }
}

/// Starts a thread that removes all temporary directories on SIGINT, SIGTERM and SIGHUP, and then
/// ends the process.
fn watch_signals() {
    let Ok(mut signals) = Signals::new([SIGINT, SIGTERM, SIGHUP]) else { return };
    let watcher = std::thread::Builder::new().name("ritornello-signals".to_owned());
    let watch = move || {
        for signal in signals.forever() {
            // Other threads may create files during the first pass; the second pass removes them.
            LIVE.lock().iter().for_each(|path| remove(path));
            LIVE.lock().iter().for_each(|path| remove(path));
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    };
    if let Err(error) = watcher.spawn(watch) {
        tracing::debug!(
            %error,
            "the thread that watches signals could not be started: a signal leaves temporary directories behind"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_is_private_and_removed_on_drop() {
        use std::os::unix::fs::PermissionsExt;
        let base = tempfile::tempdir().unwrap();
        let scratch = Scratch::new(base.path(), "test").unwrap();
        let path = scratch.path().to_owned();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        std::fs::write(path.join("file"), b"x").unwrap();
        drop(scratch);
        assert!(!path.exists());
        assert!(Scratch::new(&path, "test").is_err());
    }
}

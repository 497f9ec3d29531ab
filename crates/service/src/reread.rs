//! Files that are read again after they changed, so that rotated tokens and certificates need no
//! restart.

use parking_lot::{Mutex, RwLock};
use ritornello_format::Result;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A value that is read from files.
pub(crate) trait FromFiles: Sized {
    /// The name of such a value in log lines, such as "tokens".
    const NAME: &'static str;

    fn files(&self) -> Vec<PathBuf>;

    /// Reads the files again.
    ///
    /// # Errors
    /// If the files are unusable.
    fn read_again(&self) -> Result<Self>;
}

/// Identifies a version of a file and of its permissions: device, inode, length, and the seconds
/// and nanoseconds of the last change of the contents and of the inode. `None` if there is no file.
type Stamp = Option<([u64; 3], [i64; 4])>;

/// A value that follows its files. While the files are unusable, the last value stays in use.
#[derive(Debug)]
pub(crate) struct Reread<T> {
    value: RwLock<Arc<T>>,
    /// The stamps of the files at the last reading that succeeded, and the error of a later reading
    /// that failed. The error is empty if there is none, or if the files have these stamps again.
    last: Mutex<(Vec<Stamp>, String)>,
}

impl<T: FromFiles> Reread<T> {
    pub(crate) fn new(value: T) -> Self {
        // Without stamps the first check reads the files again, so that no change between the
        // reading of `value` and this call is missed.
        Self { value: RwLock::new(Arc::new(value)), last: Mutex::default() }
    }

    pub(crate) fn current(&self) -> Arc<T> {
        Arc::clone(&self.value.read())
    }

    /// Reads the files if they have changed since the last reading that succeeded. May wait for
    /// their disk.
    pub(crate) fn check(&self) {
        let current = self.current();
        let (stamps, message) = &mut *self.last.lock();
        // Take the stamps before the reading: a later change has other stamps.
        let found: Vec<Stamp> = current.files().iter().map(|path| stamp(path)).collect();
        if *stamps == found {
            if !std::mem::take(message).is_empty() {
                tracing::info!("the {} can be used again", T::NAME);
            }
            return;
        }
        match current.read_again() {
            Ok(value) => {
                *self.value.write() = Arc::new(value);
                if !stamps.is_empty() || !message.is_empty() {
                    tracing::info!("the {} changed, and the service uses the new files", T::NAME);
                }
                (*stamps, *message) = (found, String::new());
            }
            Err(error) => {
                let failed = error.to_string();
                if *message != failed {
                    tracing::warn!(
                        %error,
                        "the {} cannot be used: the service keeps what it had",
                        T::NAME
                    );
                    *message = failed;
                }
            }
        }
    }
}

fn stamp(path: &Path) -> Stamp {
    let found = std::fs::metadata(path).ok()?;
    let times = [found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec()];
    Some(([found.dev(), found.ino(), found.len()], times))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_format::Error;
    use std::fs::{read_to_string, rename, write};

    #[derive(Debug)]
    struct Word(PathBuf, String);

    impl FromFiles for Word {
        const NAME: &'static str = "words";

        fn files(&self) -> Vec<PathBuf> {
            vec![self.0.clone()]
        }

        fn read_again(&self) -> Result<Self> {
            let word = read_to_string(&self.0)?;
            if word == "bad" { Err(Error::invalid(word)) } else { Ok(Self(self.0.clone(), word)) }
        }
    }

    #[test]
    fn value_follows_usable_files() {
        let dir = tempfile::tempdir().unwrap();
        let (path, new) = (dir.path().join("word"), dir.path().join("new"));
        write(&path, "one").unwrap();
        let word = Reread::new(Word(path.clone(), "none".to_owned()));
        let checked = || {
            word.check();
            word.current().1.clone()
        };
        assert_eq!(checked(), "one", "a change before the first check is found");
        let before = word.current();
        assert_eq!(checked(), "one");
        assert!(Arc::ptr_eq(&before, &word.current()), "an unchanged file is not read again");
        for (text, expected) in [("bad", "one"), ("two", "two"), ("six", "six")] {
            // Rename a new file over the old file, as programs that rotate secrets do.
            write(&new, text).unwrap();
            rename(&new, &path).unwrap();
            assert_eq!(checked(), expected);
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(checked(), "six", "a missing file changes nothing");
        write(&path, "ten").unwrap();
        assert_eq!(checked(), "ten");
    }
}

//! Files of a backend that remain after a store was converted to another backend.
//!
//! `run` and `lsm` use different file names in one directory. The store's manifest names the
//! backend whose files are in use.

use crate::Backend;
use ritornello_medium::Medium;
use std::fs;
use std::io;
use std::path::Path;

impl Backend {
    /// Whether a file or directory of this name belongs to this backend.
    fn owns(self, name: &str) -> bool {
        match self {
            Self::Run => name.starts_with("checkpoint-") || name.starts_with("journal-"),
            Self::Lsm => name == "lsm" || name.starts_with("lsm."),
            Self::Memory | Self::Art => false,
        }
    }

    /// Removes all files of `run` or `lsm` in `dir`, durably, even if the backend is not compiled
    /// in. Returns whether any file existed. For `memory` and `art` removes nothing.
    ///
    /// # Errors
    /// File-system errors. A repeated call removes the remaining files.
    pub fn remove(self, medium: &dyn Medium, dir: &Path) -> io::Result<bool> {
        let names = match medium.list(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            names => names?,
        };
        let own: Vec<_> =
            names.iter().filter(|name| name.to_str().is_some_and(|n| self.owns(n))).collect();
        for name in &own {
            let path = dir.join(name);
            let host = medium.host_path(&path);
            match self {
                // RocksDB opens its files directly, not through the medium.
                Self::Lsm if host.is_dir() => fs::remove_dir_all(&host)?,
                _ => medium.remove(&path)?,
            }
        }
        if !own.is_empty() {
            medium.sync_dir(dir)?;
        }
        Ok(!own.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_medium::Host;

    #[test]
    fn only_files_of_the_backend_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!Backend::Run.remove(&Host, &dir.path().join("none")).unwrap());
        for name in ["checkpoint-0", "journal-0000000000000001", "lsm.damaged", "other"] {
            fs::write(dir.path().join(name), b"x").unwrap();
        }
        fs::create_dir_all(dir.path().join("lsm.new/deep")).unwrap();
        assert!(Backend::Lsm.remove(&Host, dir.path()).unwrap());
        assert!(!Backend::Lsm.remove(&Host, dir.path()).unwrap());
        assert!(dir.path().join("checkpoint-0").exists());
        assert!(Backend::Run.remove(&Host, dir.path()).unwrap());
        let left: Vec<_> =
            fs::read_dir(dir.path()).unwrap().flatten().map(|e| e.file_name()).collect();
        assert_eq!(left, ["other"]);
    }
}

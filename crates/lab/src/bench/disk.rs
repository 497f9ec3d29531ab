//! The directory of a measurement, and the disk space that its files take.

use ritornello_medium::{Host, Medium};
use ritornello_store::Budget;
use ritornello_terminal::exit::Failure;
use ritornello_terminal::print::{bytes, print_stderr};
use rustix::fs::Advice;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// `statfs` magic numbers of the file systems in memory, tmpfs and ramfs.
const IN_MEMORY: [u64; 2] = [ritornello_medium::TMPFS, 0x8584_58f6];

/// Number of files under a directory, at any depth, and the bytes of their blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Number of files, and of everything else that is not a directory.
    pub files: u64,
    /// Allocated blocks, in bytes.
    pub bytes: u64,
}

impl Footprint {
    /// Counts the files under `dir`.
    ///
    /// # Errors
    /// File system errors.
    pub fn of(dir: &Path) -> std::io::Result<Self> {
        let mut sum = Self::default();
        each_file(dir, &mut |path| {
            sum.files += 1;
            sum.bytes += std::fs::symlink_metadata(path)?.blocks() * 512;
            Ok(())
        })?;
        Ok(sum)
    }
}

/// Syncs the files under `dir`, and drops them from the page cache.
///
/// # Errors
/// File system errors.
pub fn drop_page_cache(dir: &Path) -> std::io::Result<()> {
    each_file(dir, &mut |path| {
        if path.is_file() {
            let file = std::fs::File::open(path)?;
            file.sync_data()?;
            rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
        }
        Ok(())
    })
}

fn each_file(
    dir: &Path,
    visit: &mut dyn FnMut(&Path) -> std::io::Result<()>,
) -> std::io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            each_file(&entry.path(), visit)?;
        } else {
            visit(&entry.path())?;
        }
    }
    Ok(())
}

/// Returns the directory to measure in: the given directory, else the first of the current
/// directory and two temporary directories that is not in memory, else the current directory.
///
/// # Errors
/// `Unusable` if the path is not a directory, or has less than `needed` bytes free beyond the space
/// that stores leave free; file-system errors.
pub fn choose(given: Option<&Path>, needed: u64) -> Result<PathBuf, Failure> {
    let dir = match given {
        Some(dir) => dir.to_owned(),
        None => {
            let candidates =
                [std::env::current_dir().ok(), Some(std::env::temp_dir()), Some("/var/tmp".into())];
            let found =
                candidates.into_iter().flatten().find(|dir| dir.is_dir() && !in_memory(dir));
            found.unwrap_or_else(|| PathBuf::from("."))
        }
    };
    if !dir.is_dir() {
        return Err(Failure::unusable(
            format!("{} is not a directory", dir.display()),
            "a directory on the disk to measure",
        ));
    }
    if in_memory(&dir) {
        print_stderr(&format!(
            "warning: {} is a file system in memory, so no disk is measured: \
             name a directory on a disk with --dir",
            dir.display()
        ));
    }
    let room = Host.room(&dir)?;
    let usable = room.available.saturating_sub(Budget::floor(room.total));
    if usable < needed {
        return Err(Failure::unusable(
            format!(
                "{} has room for {}, and this measurement needs {}",
                dir.display(),
                bytes(usable),
                bytes(needed)
            ),
            "a smaller --total or --entries, or a directory on another disk",
        ));
    }
    Ok(dir.canonicalize()?)
}

/// Returns whether a directory is on a file system in memory.
#[must_use]
pub fn in_memory(dir: &Path) -> bool {
    Host.room(dir).is_ok_and(|room| IN_MEMORY.contains(&room.kind))
}

/// Returns a capacity with at least `segments` segments and an index of at least `index_bytes`. The
/// capacity exceeds the smallest such capacity by at most 1/64 or 1 MiB, whichever is more.
///
/// # Errors
/// `Unusable` if no capacity fits.
pub fn capacity_for(segments: u64, segment_bytes: u64, index_bytes: u64) -> Result<u64, Failure> {
    let mut capacity = segments.max(2) * segment_bytes;
    loop {
        if let Ok(budget) = Budget::divide(capacity, segment_bytes)
            && u64::from(budget.segments_max) >= segments
            && budget.index_bytes >= index_bytes
        {
            return Ok(capacity);
        }
        capacity += (capacity / 64).max(1 << 20);
        if capacity > 1 << 56 {
            return Err(Failure::unusable(
                "no capacity fits this measurement",
                "a smaller --total or --entries, and a segment size of 1 MiB to 256 MiB",
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn footprint_counts_files_and_blocks() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("inner")).unwrap();
        std::fs::write(dir.path().join("inner/a"), [1; 5000]).unwrap();
        std::fs::write(dir.path().join("b"), b"").unwrap();
        drop_page_cache(dir.path()).unwrap();
        let found = Footprint::of(dir.path()).unwrap();
        assert_eq!(found.files, 2);
        assert!(found.bytes >= 5000);
    }

    #[test]
    fn capacity_fits_requested_segments_and_index() {
        for (segments, segment_bytes, index) in [(2, 1 << 20, 0), (10, 256 << 20, 1 << 28)] {
            let capacity = capacity_for(segments, segment_bytes, index).unwrap();
            let budget = Budget::divide(capacity, segment_bytes).unwrap();
            assert!(u64::from(budget.segments_max) >= segments && budget.index_bytes >= index);
        }
        assert!(capacity_for(2, 12345, 0).is_err());
    }

    #[test]
    fn missing_space_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let failure = choose(Some(dir.path()), u64::MAX).unwrap_err();
        assert!(failure.line.contains("room"), "{failure:?}");
        assert!(choose(Some(&dir.path().join("missing")), 0).is_err());
    }
}

//! The list of directories that a store is opened with: the store's own directory, and further
//! directories, one per disk, which hold segments, and copies of the manifest and of the scope
//! registry.
//!
//! A list never removes a directory from a store. A directory whose disk seems not to be mounted is
//! not added: a later mount would hide the segments written there before.

use crate::directory::{Directory, SEGMENTS, VOLUMES_MAX};
use crate::options::Options;
use ritornello_format::{Error, Manifest, Result, VolumeMarker};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

impl Options {
    /// The listed directories after the store's own.
    pub(crate) fn further(&self) -> &[PathBuf] {
        self.further_dirs.as_deref().unwrap_or_default()
    }
}

impl Directory {
    /// Checks that `options` do not name both `paths` and listed directories, that the listed
    /// directories and the store's own are at most [`VOLUMES_MAX`], and that none of them equals,
    /// or is inside, another. Changes nothing.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn check_listed(&self, options: &Options) -> Result<()> {
        let further = options.further();
        if !further.is_empty() && !options.paths.is_empty() {
            return Err(Error::invalid(
                "several directories and `paths` are given: leave out `paths`",
            ));
        }
        if further.len() >= VOLUMES_MAX {
            return Err(Error::invalid("a store spreads over at most 256 directories: list fewer"));
        }
        let mut seen = vec![(self.path().to_owned(), self.real(""))];
        for path in further {
            if path.as_os_str().is_empty() {
                return Err(Error::invalid(
                    "the path of a listed directory is empty: list one directory per disk",
                ));
            }
            let real = self.real(&self.volume_name(path)?);
            for (other, other_real) in &seen {
                let why = if real == *other_real {
                    "the same directory is listed twice, maybe by another name: list each disk once"
                } else if real.starts_with(other_real) || other_real.starts_with(&real) {
                    "a listed directory is inside another: list directories beside each other"
                } else {
                    continue;
                };
                return Err(Error::invalid(why)
                    .with("dir", path.display())
                    .with("other", other.display()));
            }
            seen.push((path.clone(), real));
        }
        Ok(())
    }

    /// Checks that a new store may be created in the listed directories. Changes nothing.
    ///
    /// # Errors
    /// Any error of [`Self::check_listed`]; `Invalid` if a listed directory belongs to another
    /// store; `Retry` if the disk of a listed directory seems not to be mounted.
    pub fn check_new(&self, options: &Options) -> Result<()> {
        self.check_listed(options)?;
        let mut dirs = vec![self.real("")];
        for path in options.further() {
            let dir = self.real(&self.volume_name(path)?);
            self.check_outside_stores(&dir)?;
            dirs.push(dir);
        }
        below_mount_points(&dirs, device).next().map_or(Ok(()), |dir| {
            Err(Error::retry(
                "a listed directory is on the root file system and another is not, as if a disk \
                 were not mounted: mount the disk, or create the store in the first directory \
                 alone and add the others with `ritornello paths add`",
            )
            .with("dir", dir.display()))
        })
    }

    /// Adds the listed directories that the store lacks, each with a call of `add`. A directory
    /// that cannot be added is logged, and the store is used without it. Several processes may add
    /// the same directory concurrently, so an error of `add` is ignored if the store has the
    /// directory afterwards. Logs the directories of the store that are not listed: the store keeps
    /// them.
    pub fn add_listed(&self, options: &Options, add: impl Fn(String) -> Result<()>) {
        let Some(further) = &options.further_dirs else { return };
        let Ok(Some(stored)) = self.manifest() else { return };
        let main = self.path().display();
        for path in further {
            let given = path.display();
            let added = self.volume_name(path).and_then(|name| {
                if self.has_volume(&stored, &name) {
                    return Ok(false);
                }
                self.check_addition(&name, further)?;
                match add(name.clone()) {
                    Err(error) if !self.has_volume_now(&name) => Err(error),
                    _ => Ok(true),
                }
            });
            match added {
                Ok(true) => tracing::info!(dir = %main, added = %given, "a directory is added"),
                Ok(false) => {}
                Err(error) => tracing::warn!(
                    dir = %main,
                    "the store is used without the listed directory {given}, which could not be \
                     added (`ritornello paths add {main} {given}` adds it): {error}"
                ),
            }
        }
        let unlisted = self.unlisted(&stored, further);
        if !unlisted.is_empty() {
            tracing::warn!(
                dir = %main,
                "the store has directories that are not listed, and keeps them: {} (`ritornello \
                 paths drain {main} DIR` removes one)",
                unlisted.join(", ")
            );
        }
    }

    /// The directories of the store, besides its own, that are neither in `further` nor being
    /// drained.
    fn unlisted<'a>(&self, stored: &'a Manifest, further: &[PathBuf]) -> Vec<&'a str> {
        let names: Vec<String> =
            further.iter().filter_map(|path| self.volume_name(path).ok()).collect();
        let listed: Vec<PathBuf> = names.iter().map(|name| self.real(name)).collect();
        let volumes = stored.volumes.iter().filter(|volume| volume.is_active());
        let others = volumes.map(|volume| &*volume.dir).filter(|dir| {
            *dir != SEGMENTS
                && !names.iter().any(|name| name == dir)
                && !listed.contains(&self.real(dir))
        });
        others.collect()
    }

    /// Whether the store has the directory of the volume `name`, by this or another name.
    fn has_volume(&self, stored: &Manifest, name: &str) -> bool {
        // An absent directory may resolve differently than when it was added, so names are compared
        // as well.
        let real = self.real(name);
        let mut volumes = stored.volumes.iter().filter(|volume| !volume.is_retired());
        volumes.any(|volume| volume.dir == name || self.real(&volume.dir) == real)
    }

    fn has_volume_now(&self, name: &str) -> bool {
        self.manifest().ok().flatten().is_some_and(|stored| self.has_volume(&stored, name))
    }

    /// Checks what `paths add` leaves to the operator: that the directory's disk is mounted, and
    /// that the directory is in no other store.
    fn check_addition(&self, name: &str, further: &[PathBuf]) -> Result<()> {
        let new = self.real(name);
        let listed = further.iter().filter_map(|path| self.volume_name(path).ok());
        let mut dirs = vec![self.real(""), new.clone()];
        dirs.extend(listed.map(|name| self.real(&name)));
        if below_mount_points(&dirs, device).any(|dir| *dir == new) {
            return Err(Error::retry(
                "the directory is on the root file system and another listed directory is not, as \
                 if its disk were not mounted: mount the disk",
            ));
        }
        self.check_outside_stores(&new)
    }

    /// Checks that `dir` neither holds a store nor is inside a directory of one.
    fn check_outside_stores(&self, dir: &Path) -> Result<()> {
        let has_marker = |part: &Path| {
            let found = self.read_in(part, VolumeMarker::FILE).ok().flatten();
            found.is_some_and(|bytes| VolumeMarker::decode(&bytes).is_ok())
        };
        let belongs_to_store = |part: &&Path| {
            // A marker in `dir` is not evidence of another store: an interrupted creation or
            // addition of this store may have left it.
            Self::new(Arc::clone(&self.medium), part).holds_store()
                || (*part != dir && has_marker(part))
        };
        dir.ancestors().find(belongs_to_store).map_or(Ok(()), |store| {
            Err(Error::invalid(
                "a listed directory belongs to another store: name an empty or new directory",
            )
            .with("dir", dir.display())
            .with("store", store.display()))
        })
    }
}

/// Returns the paths in `dirs` that are on the root file system; none if all are. `device` returns
/// the device of a path.
fn below_mount_points(
    dirs: &[PathBuf],
    device: impl Fn(&Path) -> Option<u64>,
) -> impl Iterator<Item = &PathBuf> {
    let root = device(Path::new("/"));
    let is_on_root = move |dir: &&PathBuf| device(dir) == root;
    let all = dirs.iter().all(|dir| is_on_root(&dir));
    dirs.iter().filter(is_on_root).filter(move |_| !all)
}

/// The device of a path, or of its nearest ancestor that exists.
fn device(path: &Path) -> Option<u64> {
    path.ancestors().find_map(|part| Some(fs::metadata(part).ok()?.dev()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_disk_directories_beside_mounted_disks_count_as_unmounted() {
        let device = |path: &Path| Some(u64::from(path.starts_with("/nvme")));
        let found = |dirs: &[&str]| {
            let dirs: Vec<PathBuf> = dirs.iter().map(PathBuf::from).collect();
            let found: Vec<PathBuf> = below_mount_points(&dirs, device).cloned().collect();
            found.iter().map(|dir| dir.display().to_string()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(found(&["/nvme/0", "/mnt/1", "/nvme/2"]), "/mnt/1");
        assert_eq!(found(&["/mnt/0", "/nvme/1", "/mnt/2"]), "/mnt/0 /mnt/2");
        assert_eq!(found(&["/mnt/0", "/mnt/1"]), "");
        assert_eq!(found(&["/nvme/0", "/nvme/1"]), "");
        assert_eq!(found(&["/mnt/0"]), "");
    }
}

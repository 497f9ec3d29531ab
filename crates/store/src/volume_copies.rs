//! Copies of the manifest and the scope registry in the directories of volumes. `ritornello paths
//! restore` reads them if the store's own directory is lost.

use crate::directory::{COPY_OF_MANIFEST, Directory};
use ritornello_format::{Manifest, VolumeMarker};
use ritornello_medium::Access;
use std::ffi::OsStr;
use std::io;
use std::path::Path;

/// Names of the copies in a volume's directory.
pub const VOLUME_COPIES: [&str; 2] = [COPY_OF_MANIFEST, COPY_OF_SCOPES];
pub(crate) const COPY_OF_SCOPES: &str = "VOLUME.scopes";

/// Whether `name` is a copy in a volume's directory, or an unfinished copy.
#[must_use]
pub fn is_volume_copy(name: &str) -> bool {
    let ends_after = |copy| name.strip_prefix(copy).is_some_and(|end| ["", ".new"].contains(&end));
    VOLUME_COPIES.iter().any(ends_after)
}

impl Directory {
    /// Replaces the copies in `dir`, durably: the scopes before the manifest, which is therefore
    /// never newer than the scopes beside it. The copies are made by the owner of epoch
    /// `owner_epoch`.
    ///
    /// # Errors
    /// File-system errors; an error if `dir` lacks `marker`, because another file system may be
    /// mounted there, or if a later owner has written its copies.
    pub(crate) fn write_copies(
        &self,
        dir: &Path,
        marker: VolumeMarker,
        owner_epoch: u32,
        manifest: &[u8],
        scopes: &[u8],
    ) -> io::Result<()> {
        for (name, bytes) in [(COPY_OF_SCOPES, scopes), (COPY_OF_MANIFEST, manifest)] {
            self.check_copies(dir, marker, owner_epoch)?;
            let new = dir.join(format!("{name}.new"));
            // Another writer, which a stalled disk holds up, may have this file open: its later
            // writes must not reach the file that is renamed below.
            match self.medium.remove(&new) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let access = Access { write: true, create: true, direct: false };
            let file = self.medium.open(&new, access)?;
            file.set_len(0)?;
            file.write_at(bytes, 0)?;
            file.sync_data()?;
            // The disk may have held up this thread for any time. In this time a later owner may
            // have written its copies, or another store may have got the directory.
            self.check_copies(dir, marker, owner_epoch)?;
            self.medium.rename(&new, &dir.join(name))?;
            self.medium.sync_dir(dir)?;
        }
        Ok(())
    }

    /// Fails if `dir` lacks `marker`, or has a copy of an owner after `owner_epoch`.
    fn check_copies(&self, dir: &Path, marker: VolumeMarker, owner_epoch: u32) -> io::Result<()> {
        if !self.has_marker(dir, marker) {
            return Err(io::Error::other("the directory does not carry the volume's marker"));
        }
        let found = self.copied_manifest(dir, marker.store);
        if found.is_some_and(|found| found.owner_epoch > owner_epoch) {
            return Err(io::Error::other("a later owner has written the copies"));
        }
        Ok(())
    }

    /// The copy of the manifest of `store` in `dir`; `None` if it is missing, damaged, unreadable
    /// or another store's.
    pub(crate) fn copied_manifest(&self, dir: &Path, store: [u8; 16]) -> Option<Manifest> {
        let found = self.read_in(dir, COPY_OF_MANIFEST).ok().flatten()?;
        Manifest::decode(&found).ok().filter(|found| found.uuid == store)
    }

    /// Removes the copies from the directory of a volume that is no longer used.
    pub(crate) fn remove_copies(&self, dir: &Path) -> io::Result<()> {
        for name in VOLUME_COPIES.map(|copy| [copy.to_owned(), format!("{copy}.new")]).concat() {
            match self.medium.remove(&dir.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether the file `name` in `dir` is a copy that `store` may remove: the copies in `dir` are
    /// not another store's.
    pub(crate) fn is_own_copy(&self, dir: &Path, name: &OsStr, store: [u8; 16]) -> bool {
        let found = self.read_in(dir, COPY_OF_MANIFEST).ok().flatten();
        let manifest = found.and_then(|bytes| Manifest::decode(&bytes).ok());
        name.to_str().is_some_and(is_volume_copy)
            && manifest.is_none_or(|manifest| manifest.uuid == store)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_format::VolumeRecord;
    use ritornello_medium::{Faulty, MediumFault, Op, Rule, Schedule, SimDisk};
    use std::sync::Arc;
    use std::time::Duration;

    fn manifest(owner_epoch: u32) -> Vec<u8> {
        Manifest {
            uuid: [7; 16],
            owner_epoch,
            generations: 1,
            clean: false,
            segment_bytes: 1 << 20,
            capacity: 64 << 20,
            index: "run".to_owned(),
            volumes: vec![VolumeRecord::new("segments"), VolumeRecord::new("/a")],
            owner: String::new(),
        }
        .encode()
    }

    /// A disk holds up a copy of one owner's file until the next owner has written its copies, or
    /// until another store has the directory: the late copy is not stored.
    #[test]
    fn late_copy_replaces_nothing() {
        for (held_up, removed) in
            [(COPY_OF_SCOPES, false), (COPY_OF_MANIFEST, false), (COPY_OF_SCOPES, true)]
        {
            let (disk, schedule) = (SimDisk::new(1 << 20), Schedule::new());
            let stalling = Faulty::new(Arc::new(disk.clone()), schedule.clone());
            let (dir, store) = (Path::new("/a"), Path::new("/store"));
            let (now, late) =
                (Directory::new(Arc::new(disk), store), Directory::new(Arc::new(stalling), store));
            let marker = VolumeMarker { store: [7; 16], volume: 1 };
            let other = VolumeMarker { store: [8; 16], ..marker };
            now.medium.create_dir(dir).unwrap();
            now.write_marker(dir, marker).unwrap();
            schedule.add(Rule::nth(1, MediumFault::Stall).on(Op::Write).at(held_up));
            std::thread::scope(|scope| {
                let copies = || late.write_copies(dir, marker, 3, &manifest(3), b"late");
                let thread = scope.spawn(copies);
                let new = format!("{held_up}.new");
                while now.read_in(dir, &new).unwrap().is_none() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let changed = if removed {
                    now.unmark(dir).and_then(|()| now.write_marker(dir, other))
                } else {
                    now.write_copies(dir, marker, 4, &manifest(4), b"scopes")
                };
                schedule.heal();
                changed.unwrap();
                assert!(thread.join().unwrap().is_err(), "{held_up} {removed}");
            });
            let found = VOLUME_COPIES.map(|name| now.read_in(dir, name).unwrap());
            let expected = (!removed).then(|| [manifest(4), b"scopes".to_vec()]);
            assert_eq!(found, expected.map_or([None, None], |files| files.map(Some)));
        }
    }
}

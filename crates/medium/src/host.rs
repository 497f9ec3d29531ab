//! The machine's own file system.

use crate::{Access, FileOwner, Medium, MediumFile, Room};
use rustix::fs::{FallocateFlags, Mode, OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, retry_on_intr};
use std::ffi::OsString;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

/// Offsets and lengths of direct I/O are multiples of 4,096 bytes.
const SECTOR: usize = 4096;
/// The unit of `st_blocks` on every file system of Linux.
const STAT_BLOCK: u64 = 512;

/// The machine's own file system, through plain system calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct Host;

impl Medium for Host {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)
    }

    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn MediumFile>> {
        // `NONBLOCK`, so that a pipe in the place of a file does not block the open.
        let mut flags = OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        flags |= if access.write { OFlags::RDWR | OFlags::NOFOLLOW } else { OFlags::RDONLY };
        if access.create {
            flags |= OFlags::CREATE;
        }
        if access.direct {
            flags |= OFlags::DIRECT;
        }
        let fd = retry_on_intr(|| rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR));
        let file = match fd {
            Err(Errno::LOOP) if access.write => return Err(refused("the file is a symbolic link")),
            fd => File::from(fd?),
        };
        check(&file, access.write)?;
        fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
        Ok(Arc::new(HostFile { file, direct: access.direct }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        let mut names = std::fs::read_dir(dir)?
            .map(|entry| entry.map(|entry| entry.file_name()))
            .collect::<io::Result<Vec<_>>>()?;
        names.sort_unstable();
        Ok(names)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        Ok(rustix::fs::fsync(open_dir(dir)?)?)
    }

    fn room(&self, dir: &Path) -> io::Result<Room> {
        let stat = retry_on_intr(|| rustix::fs::statfs(dir))?;
        // Block counts are in fragments; kernels that do not report the size of a fragment leave it
        // zero.
        let unit = if stat.f_frsize > 0 { stat.f_frsize } else { stat.f_bsize } as u64;
        Ok(Room {
            available: stat.f_bavail.saturating_mul(unit),
            total: stat.f_blocks.saturating_mul(unit),
            // A type of file system has 32 bits, and some types set the sign bit, which must not be
            // extended.
            kind: u64::from(stat.f_type as u32),
        })
    }

    fn owner(&self, dir: &Path) -> io::Result<FileOwner> {
        Ok(FileOwner::of(&std::fs::metadata(dir)?))
    }

    fn close_to_others(&self, dir: &Path) -> io::Result<()> {
        let dir = open_dir(dir)?;
        if !FileOwner::of(&dir.metadata()?).is_this_user {
            return Err(refused("the directory belongs to another user"));
        }
        Ok(rustix::fs::fchmod(&dir, Mode::RWXU)?)
    }
}

fn open_dir(dir: &Path) -> io::Result<File> {
    let flags = OFlags::CLOEXEC | OFlags::DIRECTORY | OFlags::RDONLY;
    Ok(retry_on_intr(|| rustix::fs::open(dir, flags, Mode::empty()))?.into())
}

/// Rejects all files except regular files, and for writing also files of other users, who could
/// read and change the written bytes.
fn check(file: &File, write: bool) -> io::Result<()> {
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(refused("the path does not lead to a regular file"));
    }
    if write && found.uid() != rustix::process::geteuid().as_raw() {
        return Err(refused("the file belongs to another user"));
    }
    Ok(())
}

fn refused(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

#[derive(Debug)]
struct HostFile {
    file: File,
    direct: bool,
}

impl MediumFile for HostFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.file.read_at(&mut buffer[filled..], offset + filled as u64) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            if self.direct && filled % SECTOR != 0 {
                // A direct read ends inside a sector only at the end of the file; another read at
                // this unaligned offset would fail.
                break;
            }
        }
        Ok(filled)
    }

    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(buffer, offset)
    }

    fn sync_data(&self) -> io::Result<()> {
        // A failed sync is not retried, because the kernel may have dropped the dirty pages.
        Ok(rustix::fs::fdatasync(&self.file)?)
    }

    fn allocate(&self, length: u64) -> io::Result<()> {
        if length == 0 {
            return Ok(());
        }
        Ok(retry_on_intr(|| rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, length))?)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.file.set_len(length)
    }

    fn drain(&self) -> io::Result<()> {
        // `fallocate` waits for the inode's direct I/O before it examines the range
        // (`inode_dio_wait` in `ext4_fallocate` and `xfs_file_fallocate`). The first block of a
        // segment is allocated already, so the call changes nothing.
        let flags = FallocateFlags::KEEP_SIZE;
        Ok(retry_on_intr(|| rustix::fs::fallocate(&self.file, flags, 0, SECTOR as u64))?)
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn allocated(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.blocks() * STAT_BLOCK)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    const WRITE: Access = Access { write: true, create: true, direct: false };

    #[test]
    fn files_are_private_and_readable() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a/b");
        Host.create_dir(&dir).unwrap();
        Host.create_dir(&dir).unwrap();
        let file = Host.open(&dir.join("f"), WRITE).unwrap();
        file.write_at(b"hello", 3).unwrap();
        file.sync_data().unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&dir), mode(&root.path().join("a"))), (0o700, 0o700));
        assert_eq!(mode(&dir.join("f")), 0o600);

        Host.rename(&dir.join("f"), &dir.join("g")).unwrap();
        Host.sync_dir(&dir).unwrap();
        assert_eq!(Host.list(&dir).unwrap(), ["g"]);
        let mut buffer = [1; 16];
        let again = Host.open(&dir.join("g"), Access::default()).unwrap();
        assert_eq!(again.read_at(&mut buffer, 0).unwrap(), 8);
        assert_eq!(&buffer[..8], b"\0\0\0hello");
        assert!(again.write_at(b"x", 0).is_err(), "a file opened for reading must refuse writes");
        Host.remove(&dir.join("g")).unwrap();
        assert!(Host.open(&dir.join("g"), Access::default()).is_err());
    }

    #[test]
    fn links_and_foreign_files_are_rejected() {
        let root = tempfile::tempdir().unwrap();
        let (link, target) = (root.path().join("link"), root.path().join("target"));
        std::os::unix::fs::symlink(&target, &link).unwrap();
        for create in [true, false] {
            let error = Host.open(&link, Access { create, ..WRITE }).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
        }
        assert!(!target.exists(), "the open must not follow the link");
        let pipe = root.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, Mode::RWXU).unwrap();
        for write in [true, false] {
            let access = Access { write, ..Access::default() };
            let error = Host.open(&pipe, access).unwrap_err();
            assert!(error.to_string().contains("regular"), "{error}");
        }
        if rustix::process::geteuid().is_root() {
            std::fs::write(&target, "theirs").unwrap();
            std::os::unix::fs::chown(&target, Some(12_345), None).unwrap();
            let error = Host.open(&target, WRITE).unwrap_err();
            assert!(error.to_string().contains("another user"), "{error}");
        }
    }

    #[test]
    fn directory_of_this_user_is_closed_to_others() {
        let root = tempfile::tempdir().unwrap();
        let mode = |mode| std::fs::set_permissions(root.path(), Permissions::from_mode(mode));
        mode(0o755).unwrap();
        assert!(Host.owner(root.path()).unwrap().is_open);
        Host.close_to_others(root.path()).unwrap();
        assert_eq!(Host.owner(root.path()).unwrap(), FileOwner::this_user());
        assert!(Host.owner(&root.path().join("absent")).is_err());
        if rustix::process::geteuid().is_root() {
            // A directory of another user, writable by a group of this user.
            std::os::unix::fs::chown(root.path(), Some(12_345), None).unwrap();
            mode(0o2775).unwrap();
            assert!(Host.close_to_others(root.path()).is_err());
            let owner = Host.owner(root.path()).unwrap();
            assert_eq!((owner.uid, owner.is_this_user, owner.by_group), (12_345, false, true));
        }
    }

    #[test]
    fn allocate_reserves_blocks_and_extends_the_file() {
        let root = tempfile::tempdir().unwrap();
        let file = Host.open(&root.path().join("f"), WRITE).unwrap();
        file.allocate(1 << 20).unwrap();
        assert_eq!(file.length().unwrap(), 1 << 20);
        assert!(file.allocated().unwrap() >= 1 << 20);
        file.set_len(100).unwrap();
        assert_eq!(file.length().unwrap(), 100);
        let room = Host.room(root.path()).unwrap();
        assert!(room.available > 0 && room.total >= room.available && room.kind != 0);
    }
}

//! The socket file in a store's directory, on which an owner listens.

use crate::node_directory::NodeDirectory;
use crate::owner_lost::owner_lost;
use crate::presence::random_name;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use ritornello_format::{Error, Result};
use rustix::fs::{AtFlags, Mode};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

/// Name of the file that clients connect to.
pub(crate) const NAME: &str = "owner.sock";
/// Number of random digits at the end of a socket file's temporary name.
const SUFFIX: usize = 8;
/// Length of the socket's listen queue: connections that the kernel keeps until they are accepted.
const BACKLOG: i32 = 256;

/// Distinguishes one owner's socket file from the next owner's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SocketFile {
    device: u64,
    inode: u64,
}

/// Returns the current socket file, if it exists.
pub(crate) fn present(directory: &NodeDirectory) -> Option<SocketFile> {
    let found = rustix::fs::statat(directory.dir(), NAME, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    Some(SocketFile { device: found.st_dev, inode: found.st_ino })
}

/// A listening socket with its file.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) socket: OwnedFd,
    file: Option<SocketFile>,
}

impl Listener {
    /// Listens in `directory` and replaces the socket of a former owner. The caller holds
    /// the store's lock.
    pub(crate) fn bind(directory: &NodeDirectory) -> Result<Self> {
        let failed = |error: io::Error| {
            Error::retry("the store's socket cannot be created: check the store's directory")
                .because(error)
        };
        // Bind the socket under a temporary name, and rename it once it listens, so that a client
        // that finds the socket can connect.
        let temporary = format!("{NAME}.{}", &random_name()?[..SUFFIX]);
        let socket = stream_socket().map_err(failed)?;
        let address = address(directory, &temporary).map_err(failed)?;
        bind(&socket, &address).map_err(|error| failed(error.into()))?;
        let published = (|| {
            rustix::fs::chmodat(
                directory.dir(),
                temporary.as_str(),
                Mode::RUSR | Mode::WUSR,
                AtFlags::empty(),
            )?;
            listen(&socket, BACKLOG)?;
            rustix::fs::renameat(directory.dir(), temporary.as_str(), directory.dir(), NAME)
        })();
        if let Err(error) = published {
            let _ = rustix::fs::unlinkat(directory.dir(), temporary.as_str(), AtFlags::empty());
            return Err(failed(error.into()));
        }
        Ok(Self { socket, file: present(directory) })
    }

    /// Accepts no more connections, in any process that has a copy of this socket.
    pub(crate) fn shut(&self) {
        // The call cannot fail on a listening socket.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// Removes the socket file, unless the socket file of another owner has replaced it.
    pub(crate) fn unpublish(&self, directory: &NodeDirectory) {
        if self.file.is_some() && present(directory) == self.file {
            let _ = rustix::fs::unlinkat(directory.dir(), NAME, AtFlags::empty());
        }
    }
}

/// Removes temporary socket files of owners that died in [`Listener::bind`], before they renamed
/// the file. The caller holds the store's lock and binds no socket during the call.
pub(crate) fn sweep(directory: &NodeDirectory) {
    let Ok(names) = directory.names_in(".") else { return };
    for name in names {
        let suffix = name.strip_prefix(NAME).and_then(|rest| rest.strip_prefix('.'));
        let is_drawn = |digits: &str| {
            digits.len() == SUFFIX && digits.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        };
        if suffix.is_some_and(is_drawn) {
            let _ = rustix::fs::unlinkat(directory.dir(), name.as_str(), AtFlags::empty());
        }
    }
}

/// Connects to the listening process and checks that it runs as the same user. Returns `None` if
/// the listen queue stays full for `timeout`.
///
/// # Errors
/// [`OwnerLost`](crate::owner_lost::OwnerLost) if no process listens, or a socket call fails;
/// `Retry` if this process can create no socket; `Invalid` for another user.
pub(crate) fn dial(directory: &NodeDirectory, timeout: Duration) -> Result<Option<UnixStream>> {
    let socket = stream_socket().map_err(|error| match Errno::from_io_error(&error) {
        // The shortage is this process's, and says nothing about the owner.
        Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => Error::retry(
            "this process cannot open a connection to the store's owner: raise its limit of open \
             files, or close files",
        )
        .because(error),
        _ => owner_lost(error),
    })?;
    let timeout = timeout.max(Duration::from_millis(1));
    // Connecting blocks while the listen queue is full.
    set_socket_timeout(&socket, Timeout::Send, Some(timeout)).map_err(|e| owner_lost(e.into()))?;
    let address = address(directory, NAME).map_err(owner_lost)?;
    match connect(&socket, &address) {
        Ok(()) => {}
        Err(Errno::AGAIN) => return Ok(None),
        Err(error) => return Err(owner_lost(error.into())),
    }
    check_peer(&socket)?;
    Ok(Some(UnixStream::from(socket)))
}

/// Rejects a peer of another user. Returns the peer's process id, or zero if the peer is not
/// visible in this process's PID namespace.
///
/// # Errors
/// `Invalid`, naming the peer's user; [`OwnerLost`](crate::owner_lost::OwnerLost) if the kernel
/// does not tell the peer's user.
pub(crate) fn check_peer(socket: &impl AsFd) -> Result<i32> {
    let peer =
        getsockopt(&socket.as_fd(), PeerCredentials).map_err(|error| owner_lost(error.into()))?;
    let own = rustix::process::geteuid().as_raw();
    if peer.uid() == own {
        return Ok(peer.pid());
    }
    Err(Error::invalid(
        "the process at the other end of the store's socket runs as another user: run all \
         processes of a store as the same user",
    )
    .with("theirs", peer.uid())
    .with("ours", own))
}

fn stream_socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
}

/// Returns the address of `name` in the directory. The address uses the directory's descriptor in
/// `/proc`, because the path may lead to another store now; it uses the path only if `/proc` is not
/// mounted.
fn address(directory: &NodeDirectory, name: &str) -> io::Result<SocketAddrUnix> {
    let through = PathBuf::from(format!("/proc/self/fd/{}", directory.dir().as_raw_fd()));
    let dir = if through.is_dir() { through.as_path() } else { directory.path() };
    Ok(SocketAddrUnix::new(dir.join(name))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn sweep_removes_temporary_sockets_only() {
        let dir = tempfile::tempdir().unwrap();
        let directory = NodeDirectory::open(dir.path()).unwrap();
        let listener = Listener::bind(&directory).unwrap();
        let others = ["owner.sock.backup01", "owner.sock.0123", "owner.socks.01234567"];
        for name in [&others[..], &["owner.sock.01234567"]].concat() {
            std::fs::write(dir.path().join(name), b"").unwrap();
        }
        sweep(&directory);
        assert!(!dir.path().join("owner.sock.01234567").exists());
        assert!(others.iter().all(|name| dir.path().join(name).exists()));
        assert!(present(&directory).is_some_and(|file| Some(file) == listener.file));
    }

    #[test]
    fn sockets_stay_in_a_moved_directory() {
        let root = tempfile::tempdir().unwrap();
        let (dir, moved) = (root.path().join("dir"), root.path().join("moved"));
        std::fs::create_dir(&dir).unwrap();
        let directory = NodeDirectory::open(&dir).unwrap();
        std::fs::rename(&dir, &moved).unwrap();
        let listener = Listener::bind(&directory).unwrap();
        assert!(moved.join(NAME).exists());
        assert!(dial(&directory, Duration::from_secs(5)).unwrap().is_some());

        std::fs::create_dir(&dir).unwrap();
        let other = NodeDirectory::open(&dir).unwrap();
        let others = Listener::bind(&other).unwrap();
        others.shut();
        dial(&directory, Duration::from_secs(5)).expect("this store's owner listens");
        for place in [&dir, &moved] {
            std::fs::write(place.join("owner.sock.01234567"), b"").unwrap();
        }
        std::fs::write(moved.join("owner.sock.76543210"), b"").unwrap();
        sweep(&directory);
        let left = |place: &Path| {
            let names = std::fs::read_dir(place).unwrap().map(|entry| entry.unwrap().file_name());
            names.filter(|name| name.to_string_lossy().starts_with("owner.sock.")).count()
        };
        assert_eq!((left(&dir), left(&moved)), (1, 0));
        drop(listener);
    }
}

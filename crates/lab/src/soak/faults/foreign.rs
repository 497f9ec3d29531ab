//! An owner of an unknown protocol version, which holds the directory's lock and refuses every
//! client.

use ritornello_terminal::exit::Failure;
use rustix::fs::{AtFlags, FlockOperation, fcntl_lock, unlinkat};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// A version that no build speaks.
const VERSION: u32 = 1_000_000;
const SOCKET: &str = "owner.sock";

/// Holds a store's directory until dropped.
pub struct ForeignOwner {
    /// Holds the lock of the directory, until the file is closed.
    _lock: File,
    dir: File,
    ended: Arc<AtomicBool>,
    listener: Option<JoinHandle<()>>,
}

impl ForeignOwner {
    /// Takes the directory of a store that no process has open.
    ///
    /// # Errors
    /// If a process has the store open, or the lock or the socket cannot be opened.
    pub fn take(dir: &Path) -> Result<Self, Failure> {
        let lock = OpenOptions::new().read(true).write(true).open(dir.join("LOCK"))?;
        fcntl_lock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(std::io::Error::from)?;
        let dir = File::open(dir)?;
        let _ = unlinkat(&dir, SOCKET, AtFlags::empty());
        // The path of a socket has at most 107 bytes, and the path of the directory may be longer.
        let address = format!("/proc/self/fd/{}/{SOCKET}", dir.as_raw_fd());
        let listening = UnixListener::bind(address)?;
        listening.set_nonblocking(true)?;
        let ended = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&ended);
        let listener = std::thread::spawn(move || {
            while !seen.load(Ordering::Acquire) {
                match listening.accept() {
                    Ok((stream, _)) => refuse(stream),
                    Err(_) => std::thread::sleep(Duration::from_millis(5)),
                }
            }
        });
        Ok(Self { _lock: lock, dir, ended, listener: Some(listener) })
    }
}

/// Answers a client's first message with a message of version [`VERSION`]. The first eight bytes of
/// such a message have the same meaning in all versions: a magic word and the version.
fn refuse(mut stream: UnixStream) {
    let _ = stream.set_nonblocking(false);
    let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
    let _ = stream.read(&mut [0; 1024]);
    let mut message = Vec::from(64_u32.to_le_bytes());
    message.extend_from_slice(b"RTRN");
    message.extend_from_slice(&VERSION.to_le_bytes());
    message.resize(4 + 64, 0);
    let _ = stream.write_all(&message);
}

impl Drop for ForeignOwner {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
        let _ = unlinkat(&self.dir, SOCKET, AtFlags::empty());
    }
}

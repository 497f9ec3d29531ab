//! POSIX record locks (`fcntl(2)`) on whole files.
//!
//! These locks have four properties. Ownership relies on the first two, and must respect the last
//! two:
//!
//! * A child does not inherit them by `fork`: the lock belongs to the process, not to the
//!   descriptor. Locks of `flock` and of open file descriptions last as long as any copy of the
//!   descriptor, so a forked worker would keep a dead owner's lock.
//! * The kernel releases them only when the process issues no more writes. The *last* thread of the
//!   process closes the table of open files, which releases the locks. A thread inside a direct
//!   `pread` or `pwrite` does not end before the device is done with its memory. A free lock does
//!   *not* prove that every write of its former holder has landed. The kernel ends an `io_uring`
//!   after the process, and direct writes in the block layer may take as long as the device allows.
//!   The owner drains the segments before it reuses the space
//!   (`ritornello_medium::MediumFile::drain`, and assumption 5 of `docs/format.md`).
//! * Closing *any* descriptor of the file releases the process's lock. A locked file is therefore
//!   opened once per process, see [`crate::lock`] and [`crate::presence`].
//! * A process's own lock looks free to it: `F_GETLK` reports conflicts only.

use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::io::Errno;
use rustix::process::{Flock, FlockType, fcntl_getlk};
use std::fs::File;
use std::io;

/// Another process that holds a lock. The process's id is zero if it is in another PID namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LockHolder(pub(crate) i32);

/// Takes the exclusive lock on `file`. Returns `false` if another process holds it.
pub(crate) fn try_lock(file: &File) -> io::Result<bool> {
    loop {
        return match fcntl_lock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(Errno::AGAIN | Errno::ACCESS) => Ok(false),
            Err(Errno::INTR) => continue,
            Err(error) => Err(error.into()),
        };
    }
}

/// Releases this process's lock on `file`.
pub(crate) fn unlock(file: &File) -> io::Result<()> {
    Ok(fcntl_lock(file, FlockOperation::NonBlockingUnlock)?)
}

/// The other process that holds the lock on `file`, if any.
pub(crate) fn holder(file: &File) -> io::Result<Option<LockHolder>> {
    let found = fcntl_getlk(file, &Flock::from(FlockType::WriteLock))?;
    Ok(found.map(|lock| LockHolder(lock.pid.map_or(0, |pid| pid.as_raw_nonzero().get()))))
}

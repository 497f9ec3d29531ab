//! One read or write: a range of a file, and the memory that the read fills or the write takes its
//! bytes from.

use ritornello_medium::MediumFile;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

/// Maximum entries of one vectored call (`IOV_MAX`).
const IOVECS_MAX: usize = 1024;
/// Maximum consecutive retries (`EAGAIN`, `EINTR`) of an operation.
const RETRIES_MAX: u32 = 1000;

/// A range of memory, laid out as an `iovec`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct IoVec(libc::iovec);

// SAFETY: an `IoVec` is an address and a length. Its memory is accessed only as the caller of
// `Op::new` permits.
unsafe impl Send for IoVec {}
// SAFETY: as for `Send`.
unsafe impl Sync for IoVec {}

impl IoVec {
    pub(crate) const fn new(ptr: *mut u8, len: usize) -> Self {
        Self(libc::iovec { iov_base: ptr.cast(), iov_len: len })
    }
    pub(crate) const fn ptr(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }
    pub(crate) const fn len(&self) -> usize {
        self.0.iov_len
    }
    /// Appends the iovec to `list`, or extends the last iovec if the two are adjacent.
    pub(crate) fn push_to(self, list: &mut Vec<Self>) {
        if !self.extends(list.last_mut()) {
            list.push(self);
        }
    }
    /// Extends `last` by the iovec if the two are adjacent. Returns whether `last` now covers the
    /// iovec; an empty iovec is always covered.
    pub(crate) fn extends(&self, last: Option<&mut Self>) -> bool {
        match last {
            _ if self.len() == 0 => true,
            // Compare addresses only, because the kernel does not see provenance.
            Some(last) if last.ptr() as usize + last.len() == self.ptr() as usize => {
                last.0.iov_len += self.len();
                true
            }
            _ => false,
        }
    }
}

/// One operation. A short transfer is continued with another system call.
pub(crate) struct Op {
    pub(crate) tag: u64,
    file: Arc<dyn MediumFile>,
    pub(super) write: bool,
    /// Number of the volume that holds the file.
    pub(super) volume: u8,
    pub(super) offset: u64,
    iovecs: Vec<IoVec>,
    /// Index of the first iovec that is not fully transferred.
    at: usize,
    /// Bytes that are not transferred yet.
    left: usize,
    retries: u32,
}

impl Op {
    /// A read into, or a write from, `iovecs` at `offset` of `file`.
    ///
    /// # Safety
    /// Until the operation completes, the memory of the iovecs is readable. If the operation reads
    /// the file, this memory is also writable, and no other code accesses it.
    pub(crate) unsafe fn new(
        tag: u64,
        file: Arc<dyn MediumFile>,
        write: bool,
        offset: u64,
        iovecs: Vec<IoVec>,
    ) -> Self {
        let left = iovecs.iter().map(IoVec::len).sum();
        Self { tag, file, write, volume: 0, offset, iovecs, at: 0, left, retries: 0 }
    }

    /// Sets the volume of the operation's file.
    pub(crate) fn on(self, volume: u8) -> Self {
        Self { volume, ..self }
    }

    pub(super) fn descriptor(&self) -> Option<RawFd> {
        self.file.descriptor().map(|fd| fd.as_raw_fd())
    }

    /// The `iovec`s of the next system call, at most `IOVECS_MAX`.
    pub(super) fn window(&self) -> &[libc::iovec] {
        let rest = &self.iovecs[self.at..];
        let rest = &rest[..rest.len().min(IOVECS_MAX)];
        // SAFETY: `IoVec` is a transparent `iovec`.
        unsafe { std::slice::from_raw_parts(rest.as_ptr().cast(), rest.len()) }
    }

    /// Accounts for the result of a system call. Returns `None` if the operation is not complete
    /// (submit it again), else its result.
    pub(super) fn advance(&mut self, result: io::Result<usize>) -> Option<io::Result<()>> {
        match result {
            Ok(0) if self.left > 0 => {
                let kind = if self.write {
                    io::ErrorKind::WriteZero
                } else {
                    io::ErrorKind::UnexpectedEof
                };
                Some(Err(kind.into()))
            }
            Ok(moved) => {
                self.retries = 0;
                self.skip(moved.min(self.left));
                (self.left == 0).then_some(Ok(()))
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                ) && self.retries < RETRIES_MAX =>
            {
                self.retries += 1;
                None
            }
            Err(error) => Some(Err(error)),
        }
    }

    fn skip(&mut self, mut bytes: usize) {
        self.offset += bytes as u64;
        self.left -= bytes;
        while bytes > 0 {
            let iovec = &mut self.iovecs[self.at];
            if bytes < iovec.len() {
                *iovec = IoVec::new(iovec.ptr().wrapping_add(bytes), iovec.len() - bytes);
                return;
            }
            bytes -= iovec.len();
            self.at += 1;
        }
    }

    /// Runs the operation on this thread, to completion.
    pub(super) fn perform(&mut self) -> io::Result<()> {
        match self.descriptor() {
            Some(fd) => loop {
                if self.left == 0 {
                    return Ok(());
                }
                let moved = self.call(fd);
                if let Some(end) = self.advance(moved) {
                    return end;
                }
            },
            None => self.simulate(),
        }
    }

    fn call(&self, fd: RawFd) -> io::Result<usize> {
        let iovecs = self.window();
        let (ptr, count) = (iovecs.as_ptr(), iovecs.len() as libc::c_int);
        let offset = self.offset as libc::off_t;
        // SAFETY: the caller of `Op::new` promised that the iovecs are valid; `self` holds the open
        // file.
        let moved = unsafe {
            if self.write {
                libc::pwritev(fd, ptr, count, offset)
            } else {
                libc::preadv(fd, ptr, count, offset)
            }
        };
        usize::try_from(moved).map_err(|_| io::Error::last_os_error())
    }

    /// Runs the operation through the calls of a file that has no descriptor.
    fn simulate(&mut self) -> io::Result<()> {
        for iovec in &self.iovecs {
            if self.write {
                // SAFETY: the caller of `Op::new` promised that the iovec's memory is readable.
                let bytes = unsafe { std::slice::from_raw_parts(iovec.ptr(), iovec.len()) };
                self.file.write_at(bytes, self.offset)?;
            } else {
                // SAFETY: the caller of `Op::new` promised exclusive access; all memory that a
                // caller passes is initialised.
                let bytes = unsafe { std::slice::from_raw_parts_mut(iovec.ptr(), iovec.len()) };
                if self.file.read_at(bytes, self.offset)? < bytes.len() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            self.offset += iovec.len() as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_medium::{Access, Host, Medium};

    fn op(iovecs: Vec<IoVec>) -> Op {
        let dir = tempfile::tempdir().unwrap();
        let access = Access { write: true, create: true, direct: false };
        let file = Host.open(&dir.path().join("f"), access).unwrap();
        // SAFETY: the tests never perform the operation, so no code accesses the iovecs' memory.
        unsafe { Op::new(1, file, false, 100, iovecs) }
    }

    #[test]
    fn short_transfer_continues_where_it_stopped() {
        let mut memory = [0u8; 30];
        let base = memory.as_mut_ptr();
        let mut op = op((0..3).map(|n| IoVec::new(base.wrapping_add(n * 10), 10)).collect());
        assert!(op.advance(Ok(13)).is_none());
        assert_eq!((op.offset, op.window().len(), op.window()[0].iov_len), (113, 2, 7));
        assert!(op.advance(Err(io::ErrorKind::Interrupted.into())).is_none());
        assert!(op.advance(Ok(17)).unwrap().is_ok());
    }

    #[test]
    fn end_of_file_and_too_many_retries_are_errors() {
        let mut memory = [0u8; 10];
        let mut op = op(vec![IoVec::new(memory.as_mut_ptr(), 10)]);
        let would_block = || Err(io::ErrorKind::WouldBlock.into());
        assert!((0..RETRIES_MAX).all(|_| op.advance(would_block()).is_none()));
        assert!(op.advance(would_block()).unwrap().is_err());
        assert!(op.advance(Ok(0)).unwrap().is_err());
    }

    #[test]
    fn adjacent_iovecs_are_joined() {
        let mut memory = [0u8; 30];
        let base = memory.as_mut_ptr();
        let mut list = Vec::new();
        for (at, len) in [(0, 10), (10, 5), (20, 0), (20, 10)] {
            IoVec::new(base.wrapping_add(at), len).push_to(&mut list);
        }
        assert_eq!(list.iter().map(IoVec::len).collect::<Vec<_>>(), [15, 10]);
    }
}

//! Reads checksummed frames from a file of the index `run` or of the residency backend `run`, one
//! at a time, in bounded memory.

use ritornello_format::journal::{Frame, Parsed, read_frame};
use ritornello_medium::{MediumFile, is_unreadable};
use std::io;
use std::sync::Arc;

/// Bytes of the buffer into which the file is read, unless a frame needs more.
const CHUNK: usize = 1 << 20;
/// Bytes that are read at a time after the disk failed to return more: the frames before the
/// unreadable block are then read.
const BLOCK: usize = 4096;

/// A reader of frames. The reader's buffer holds at most one chunk and one frame of the maximum
/// length, even if a damaged frame claims to be longer.
#[derive(Debug)]
pub(crate) struct Frames {
    file: Arc<dyn MediumFile>,
    buffer: Vec<u8>,
    /// The unread part of the buffer is `start..end`.
    start: usize,
    end: usize,
    /// Offset in the file of the buffer's end.
    offset: u64,
    /// Bytes to read at a time: [`CHUNK`], or [`BLOCK`] after a failed read.
    step: usize,
}

/// The result of [`Frames::next`].
#[derive(Debug)]
pub(crate) enum Next<'a> {
    Frame(Frame<'a>),
    /// The end of the file, directly after a frame.
    End,
    /// A truncated frame at the end of the file, or bytes that do not form a frame.
    Torn,
}

impl Frames {
    pub(crate) fn new(file: Arc<dyn MediumFile>, offset: u64) -> Self {
        Self { file, buffer: Vec::new(), start: 0, end: 0, offset, step: CHUNK }
    }

    /// Offset in the file of the next frame.
    pub(crate) fn position(&self) -> u64 {
        self.offset - (self.end - self.start) as u64
    }

    /// Returns the next bytes of the file: at least `count`, unless fewer are left.
    ///
    /// # Errors
    /// Errors of the file system; [`is_unreadable`] if the disk cannot return the bytes, also when
    /// they are read again.
    pub(crate) fn peek(&mut self, count: usize) -> io::Result<&[u8]> {
        while self.end - self.start < count {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            let requested = count.max(self.step).max(self.end + BLOCK);
            if self.buffer.len() < requested {
                self.buffer.resize(requested, 0);
            }
            let read = self.read()?;
            if read == 0 {
                break;
            }
            self.end += read;
            self.offset += read as u64;
        }
        Ok(&self.buffer[self.start..self.end])
    }

    /// Reads the next bytes of the file into the rest of the buffer, or only the next block if a
    /// read has failed.
    fn read(&mut self) -> io::Result<usize> {
        if self.step == CHUNK {
            match self.file.read_at(&mut self.buffer[self.end..], self.offset) {
                Err(error) if is_unreadable(&error) => self.step = BLOCK,
                read => return read,
            }
        }
        let block = BLOCK - self.offset as usize % BLOCK;
        let end = self.buffer.len().min(self.end + block);
        read_twice(self.file.as_ref(), &mut self.buffer[self.end..end], self.offset)
    }

    /// Returns the next frame. After `End` or `Torn`, every call returns the same value again.
    ///
    /// # Errors
    /// Errors of [`Frames::peek`]; [`Frames::position`] is then the offset of the frame.
    pub(crate) fn next(&mut self) -> io::Result<Next<'_>> {
        let mut needed = 0;
        loop {
            let bytes = self.peek(needed)?;
            let short = bytes.len() < needed;
            match read_frame(bytes) {
                Parsed::Frame(frame) => {
                    needed = frame.bytes;
                    break;
                }
                Parsed::Damaged => return Ok(Next::Torn),
                Parsed::Short(_) if short => {
                    return Ok(if bytes.is_empty() { Next::End } else { Next::Torn });
                }
                Parsed::Short(more) => needed = more,
            }
        }
        let start = self.start;
        self.start += needed;
        // Parse the frame a second time, because the borrow checker does not let the loop return
        // the first result. A second checksum takes little time beside the read from the file.
        match read_frame(&self.buffer[start..start + needed]) {
            Parsed::Frame(frame) => Ok(Next::Frame(frame)),
            _ => Ok(Next::Torn),
        }
    }
}

/// Reads at `offset`; a second time if the disk fails the first read, because the fault may be
/// temporary.
pub(crate) fn read_twice(
    file: &dyn MediumFile,
    buffer: &mut [u8],
    offset: u64,
) -> io::Result<usize> {
    match file.read_at(buffer, offset) {
        Err(error) if is_unreadable(&error) => file.read_at(buffer, offset),
        read => read,
    }
}

//! Reads checksummed frames from a file of the index `run` or of the residency backend `run`, one
//! at a time, in bounded memory.

use ritornello_format::Result;
use ritornello_format::journal::{Frame, Parsed, read_frame};
use ritornello_medium::MediumFile;
use std::sync::Arc;

/// Bytes of the buffer into which the file is read, unless a frame needs more.
const CHUNK: usize = 1 << 20;

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
        Self { file, buffer: Vec::new(), start: 0, end: 0, offset }
    }

    /// Offset in the file of the next frame.
    pub(crate) fn position(&self) -> u64 {
        self.offset - (self.end - self.start) as u64
    }

    /// Returns the next bytes of the file: at least `count`, unless fewer are left.
    pub(crate) fn peek(&mut self, count: usize) -> Result<&[u8]> {
        while self.end - self.start < count {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            let requested = count.max(CHUNK);
            if self.buffer.len() < requested {
                self.buffer.resize(requested, 0);
            }
            let read = self.file.read_at(&mut self.buffer[self.end..], self.offset)?;
            if read == 0 {
                break;
            }
            self.end += read;
            self.offset += read as u64;
        }
        Ok(&self.buffer[self.start..self.end])
    }

    /// Returns the next frame. After `End` or `Torn`, every call returns the same value again.
    pub(crate) fn next(&mut self) -> Result<Next<'_>> {
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

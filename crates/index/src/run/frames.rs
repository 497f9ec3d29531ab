//! Frames from a file, one after the other, in bounded memory.

use ritornello_format::Result;
use ritornello_format::journal::{Frame, Parsed, read_frame};
use ritornello_medium::MediumFile;
use std::sync::Arc;

/// Bytes read at a time.
const CHUNK: usize = 1 << 20;

/// Reads frames. The buffer holds one chunk and at most one frame more, whatever lengths the file
/// claims.
#[derive(Debug)]
pub(crate) struct Frames {
    file: Arc<dyn MediumFile>,
    buffer: Vec<u8>,
    /// The unread part of the buffer.
    start: usize,
    end: usize,
    /// Offset in the file of the end of the buffer.
    offset: u64,
}

/// What came next.
#[derive(Debug)]
pub(crate) enum Next<'a> {
    Frame(Frame<'a>),
    /// The file ended behind the last frame.
    End,
    /// The file ended within a frame, or what follows is none.
    Torn,
}

impl Frames {
    /// Reads `file` from `offset`.
    pub(crate) fn new(file: Arc<dyn MediumFile>, offset: u64) -> Self {
        Self { file, buffer: Vec::new(), start: 0, end: 0, offset }
    }

    /// Offset in the file of the next frame.
    pub(crate) fn position(&self) -> u64 {
        self.offset - (self.end - self.start) as u64
    }

    /// The next bytes, at least `count` unless the file ends before.
    pub(crate) fn peek(&mut self, count: usize) -> Result<&[u8]> {
        while self.end - self.start < count {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            let wanted = count.max(CHUNK);
            if self.buffer.len() < wanted {
                self.buffer.resize(wanted, 0);
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

    /// The next frame. After `End` or `Torn` it is the same again.
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
        // Parsed twice to hand out a borrow; the second time without the checksum would be nicer
        // than it is worth: it takes a thirtieth of a nanosecond a byte.
        match read_frame(&self.buffer[start..start + needed]) {
            Parsed::Frame(frame) => Ok(Next::Frame(frame)),
            _ => Ok(Next::Torn),
        }
    }
}

//! Little-endian encoding of records, and bounds-checked decoding.

use crate::{Error, Result};
use bytes::{Buf, BufMut};

/// Encodes fields by appending to a byte vector.
#[derive(Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// An empty writer.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
    /// Appends one byte.
    pub fn u8(&mut self, value: u8) -> &mut Self {
        self.0.put_u8(value);
        self
    }
    /// Appends two bytes.
    pub fn u16(&mut self, value: u16) -> &mut Self {
        self.0.put_u16_le(value);
        self
    }
    /// Appends four bytes.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.0.put_u32_le(value);
        self
    }
    /// Appends eight bytes.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.0.put_u64_le(value);
        self
    }
    /// Appends bytes without their length.
    pub fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.put_slice(bytes);
        self
    }
    /// Appends the length as a `u32`, then the bytes.
    pub fn blob(&mut self, bytes: &[u8]) -> &mut Self {
        self.u32(bytes.len() as u32).raw(bytes)
    }
    /// The bytes written so far.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.0
    }
    /// Converts the writer to the bytes written.
    #[must_use]
    pub fn into_vec(self) -> Vec<u8> {
        self.0
    }
}

/// Decodes fields. Too few bytes are a `Miss`, never a panic.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Reads from the start of `bytes`.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }
    /// Reads one byte.
    pub fn u8(&mut self) -> Result<u8> {
        self.0.try_get_u8().map_err(|_| short())
    }
    /// Reads two bytes.
    pub fn u16(&mut self) -> Result<u16> {
        self.0.try_get_u16_le().map_err(|_| short())
    }
    /// Reads four bytes.
    pub fn u32(&mut self) -> Result<u32> {
        self.0.try_get_u32_le().map_err(|_| short())
    }
    /// Reads eight bytes.
    pub fn u64(&mut self) -> Result<u64> {
        self.0.try_get_u64_le().map_err(|_| short())
    }
    /// Reads `count` bytes.
    pub fn raw(&mut self, count: usize) -> Result<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(count).ok_or_else(short)?;
        self.0 = tail;
        Ok(head)
    }
    /// Reads `N` bytes.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.raw(N)?.try_into().map_err(|_| short())
    }
    /// Reads a `u32` length, then bytes of this length.
    pub fn blob(&mut self) -> Result<&'a [u8]> {
        let count = self.u32()?;
        self.raw(count as usize)
    }
    /// Reads a blob that must be UTF-8.
    pub fn text(&mut self) -> Result<String> {
        String::from_utf8(self.blob()?.to_vec())
            .map_err(|error| Error::miss("a record's text is not UTF-8").because(error))
    }
    /// Number of unread bytes.
    #[must_use]
    pub fn remaining(&self) -> usize {
        self.0.len()
    }
    /// The unread bytes.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.0
    }
}

fn short() -> Error {
    Error::miss("a record ends before its last field")
}

//! The keys of a call: a list in the caller's memory, or packed, as they come from a socket.

use ritornello_format::{Error, KEY_BYTES_MIN, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;

/// Keys in sequence order. A list is packed when it is serialized, so that hundreds of keys take as
/// few allocations on each side of a socket as one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys<'a> {
    /// The keys one by one.
    Listed(&'a [&'a [u8]]),
    /// The keys as a socket delivers them.
    Packed(PackedKeys<'a>),
}

/// Concatenated keys. The lengths are not checked against the bytes before [`Keys::list`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedKeys<'a> {
    /// Length of every key; zero if the lengths differ or there is no key.
    width: u8,
    /// Length of each key, if they differ.
    #[serde(borrow, serialize_with = "as_bytes")]
    lengths: &'a [u8],
    #[serde(borrow, serialize_with = "as_bytes")]
    bytes: &'a [u8],
}

impl<'a> Keys<'a> {
    /// Returns the keys one by one.
    ///
    /// # Errors
    /// `Invalid` if lengths and bytes of packed keys do not agree, or if packed keys have on
    /// average fewer than [`KEY_BYTES_MIN`] bytes. Does not check the length of each key.
    pub fn list(&self) -> Result<Cow<'a, [&'a [u8]]>> {
        match self {
            Self::Listed(keys) => Ok(Cow::Borrowed(keys)),
            Self::Packed(packed) => packed.split().map(Cow::Owned),
        }
    }
}

impl<'a> PackedKeys<'a> {
    /// Number of keys.
    pub(super) fn len(&self) -> usize {
        match usize::from(self.width) {
            0 => self.lengths.len(),
            width => self.bytes.len() / width,
        }
    }

    fn split(&self) -> Result<Vec<&'a [u8]>> {
        let disagree = || Error::invalid("the lengths of packed keys do not match their bytes");
        let count = self.len();
        // Each key takes an entry of 16 bytes in the list, so keys shorter than `KEY_BYTES_MIN`
        // could make the list many times as large as their message.
        if count > self.bytes.len() / KEY_BYTES_MIN {
            return Err(Error::invalid(format!("a key has fewer than {KEY_BYTES_MIN} bytes")));
        }
        if self.width > 0 {
            let keys = self.bytes.chunks_exact(usize::from(self.width));
            return if keys.remainder().is_empty() { Ok(keys.collect()) } else { Err(disagree()) };
        }
        let mut rest = self.bytes;
        let mut keys = Vec::with_capacity(count);
        for &length in self.lengths {
            let (key, tail) = rest.split_at_checked(usize::from(length)).ok_or_else(disagree)?;
            keys.push(key);
            rest = tail;
        }
        if rest.is_empty() { Ok(keys) } else { Err(disagree()) }
    }
}

impl Serialize for Keys<'_> {
    /// Fails if a key is longer than 255 bytes.
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let keys = match self {
            Self::Packed(packed) => return packed.serialize(serializer),
            Self::Listed(keys) => keys,
        };
        let lengths = keys.iter().map(|key| u8::try_from(key.len()));
        let lengths: Vec<u8> =
            lengths.collect::<std::result::Result<_, _>>().map_err(serde::ser::Error::custom)?;
        let bytes = keys.concat();
        let width = lengths.first().copied().unwrap_or_default();
        let packed = if lengths.iter().all(|length| *length == width) {
            PackedKeys { width, lengths: &[], bytes: &bytes }
        } else {
            PackedKeys { width: 0, lengths: &lengths, bytes: &bytes }
        };
        packed.serialize(serializer)
    }
}

impl<'a, 'de: 'a> Deserialize<'de> for Keys<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        PackedKeys::deserialize(deserializer).map(Self::Packed)
    }
}

/// Serializes bytes in one piece; serde would write a slice byte by byte.
pub(super) fn as_bytes<S: Serializer>(
    bytes: &[u8],
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_bytes(bytes)
}

/// Like [`as_bytes`], for optional bytes.
pub(super) fn as_optional_bytes<S: Serializer>(
    bytes: &Option<&[u8]>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    struct Bytes<'a>(&'a [u8]);
    impl Serialize for Bytes<'_> {
        fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
            serializer.serialize_bytes(self.0)
        }
    }
    bytes.map(Bytes).serialize(serializer)
}

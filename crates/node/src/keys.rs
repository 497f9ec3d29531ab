//! Keys on the wire, concatenated: hundreds of keys take one allocation on each side.

use ritornello_format::{Error, Result, check_keys};
use serde::{Deserialize, Serialize, Serializer};

/// The concatenated keys of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Keys<'a> {
    /// Length of every key; zero if they differ.
    width: u8,
    /// Length of each key, if they differ.
    #[serde(borrow, serialize_with = "as_bytes")]
    lengths: &'a [u8],
    #[serde(borrow, serialize_with = "as_bytes")]
    bytes: &'a [u8],
}

/// Serializes bytes in one piece; serde would write a slice byte by byte.
pub(crate) fn as_bytes<S: Serializer>(
    bytes: &[u8],
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_bytes(bytes)
}

/// Like [`as_bytes`], for optional bytes.
pub(crate) fn as_optional_bytes<S: Serializer>(
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

/// Owned keys to be sent as [`Keys`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Flattened {
    width: u8,
    lengths: Vec<u8>,
    bytes: Vec<u8>,
}

impl Flattened {
    /// Concatenates `keys`.
    ///
    /// # Errors
    /// `Invalid` for keys that are too short or too long.
    pub(crate) fn new(keys: &[&[u8]]) -> Result<Self> {
        check_keys(keys)?;
        let width = keys.first().map_or(0, |key| key.len());
        let same = keys.iter().all(|key| key.len() == width);
        let mut bytes = Vec::with_capacity(keys.iter().map(|key| key.len()).sum());
        keys.iter().for_each(|key| bytes.extend_from_slice(key));
        // `check_keys` limits keys to 64 bytes.
        let lengths = if same { Vec::new() } else { keys.iter().map(|k| k.len() as u8).collect() };
        Ok(Self { width: if same { width as u8 } else { 0 }, lengths, bytes })
    }

    /// The keys in their wire form.
    pub(crate) fn as_keys(&self) -> Keys<'_> {
        Keys { width: self.width, lengths: &self.lengths, bytes: &self.bytes }
    }
}

impl<'a> Keys<'a> {
    /// Splits into single keys.
    ///
    /// # Errors
    /// `Invalid` if lengths and bytes do not agree.
    pub(crate) fn split(&self) -> Result<Vec<&'a [u8]>> {
        let disagree = || Error::invalid("the lengths of keys do not add up");
        if self.width > 0 {
            let keys = self.bytes.chunks_exact(usize::from(self.width));
            return if keys.remainder().is_empty() { Ok(keys.collect()) } else { Err(disagree()) };
        }
        let mut rest = self.bytes;
        let mut keys = Vec::with_capacity(self.lengths.len());
        for &length in self.lengths {
            let (key, tail) = rest.split_at_checked(usize::from(length)).ok_or_else(disagree)?;
            keys.push(key);
            rest = tail;
        }
        if rest.is_empty() { Ok(keys) } else { Err(disagree()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::decode;

    #[test]
    fn keys_of_any_lengths_round_trip() {
        let (short, long) = ([1u8; 8], [2u8; 64]);
        for keys in [vec![], vec![&long[..]; 3], vec![&short[..], &long[..], &short[..]]] {
            let flat = Flattened::new(&keys).unwrap();
            let bytes = postcard::to_stdvec(&flat.as_keys()).unwrap();
            let back: Keys<'_> = decode(&bytes).unwrap();
            assert_eq!(back, flat.as_keys());
            assert_eq!(back.split().unwrap(), keys);
        }
        assert!(Flattened::new(&[&[0; 7]]).is_err());
    }
}

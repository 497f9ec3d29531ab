//! Page keys, and the 16-byte hashes that the index keeps of them.

use crate::{Error, Result, ScopeId};
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// The shortest page key, in bytes.
pub const KEY_BYTES_MIN: usize = 8;
/// The longest page key, in bytes.
pub const KEY_BYTES_MAX: usize = 64;

/// Checks that all keys have a length in [`KEY_BYTES_MIN`]`..=`[`KEY_BYTES_MAX`].
///
/// # Errors
/// `Invalid` if a key is shorter or longer, with the position of the first such key.
pub fn check_keys(keys: &[&[u8]]) -> Result<()> {
    // The loop has no branch per key, because a probe may check thousands of keys.
    let is_wrong = |key: &&[u8]| !(KEY_BYTES_MIN..=KEY_BYTES_MAX).contains(&key.len());
    if !keys.iter().fold(false, |any, key| any | is_wrong(key)) {
        return Ok(());
    }
    let at = keys.iter().position(is_wrong).unwrap_or_default();
    Err(Error::invalid(format!(
        "a page key is {KEY_BYTES_MIN} to {KEY_BYTES_MAX} bytes: pass the engine's block hash"
    ))
    .with("key", at)
    .with("bytes", keys[at].len()))
}

/// Parses a page key in hexadecimal digits; `None` if the text is not pairs of digits. Does not
/// check the key's length.
#[must_use]
pub fn parse_key(digits: &str) -> Option<Vec<u8>> {
    // Check each digit here, because `from_str_radix` accepts a sign.
    if !digits.len().is_multiple_of(2) || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let pairs = (0..digits.len()).step_by(2).map(|at| &digits[at..at + 2]);
    pairs.map(|pair| u8::from_str_radix(pair, 16).ok()).collect()
}

/// Identifies a page in the index: XXH3-128 of the page's key, seeded with the first 8 bytes of the
/// id of its scope.
///
/// The hash does not resist constructed collisions. A collision cannot deliver wrong bytes, because
/// a read first compares the full key with the run header. The hash of a page is never all zeroes:
/// [`PageHash::NONE`] means "no page".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(transparent)]
pub struct PageHash(pub [u8; 16]);

impl PageHash {
    /// The value that is never the hash of a page.
    pub const NONE: Self = Self([0; 16]);

    /// The hash of `key` in `scope`.
    #[must_use]
    #[inline]
    pub fn of(scope: &ScopeId, key: &[u8]) -> Self {
        let hash = xxh3_128_with_seed(key, scope.seed());
        Self(if hash == 0 { 1u128 } else { hash }.to_le_bytes())
    }

    /// The low 64 bits, from which hash tables of the index derive a page's position.
    #[must_use]
    #[inline]
    pub fn low(self) -> u64 {
        u128::from_le_bytes(self.0) as u64
    }

    /// The high 64 bits, independent of [`PageHash::low`].
    #[must_use]
    #[inline]
    pub fn high(self) -> u64 {
        (u128::from_le_bytes(self.0) >> 64) as u64
    }
}

/// A sequence of page hashes. [`ScopedKeys`] computes hashes on demand, because a probe needs the
/// hashes of only a few pages; slices of [`PageHash`] hold them.
pub trait PageHashes {
    /// Number of pages.
    fn len(&self) -> usize;
    /// Hash of page number `at`, which must be less than `len()`.
    fn at(&self, at: usize) -> PageHash;
    /// Whether the sequence is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<T: AsRef<[PageHash]> + ?Sized> PageHashes for T {
    fn len(&self) -> usize {
        self.as_ref().len()
    }
    #[inline]
    fn at(&self, at: usize) -> PageHash {
        self.as_ref()[at]
    }
}

/// Keys of one scope, hashed lazily.
#[derive(Clone, Copy, Debug)]
pub struct ScopedKeys<'a> {
    /// The scope of all keys.
    pub scope: &'a ScopeId,
    /// The engine's block hashes, in sequence order.
    pub keys: &'a [&'a [u8]],
}

impl PageHashes for ScopedKeys<'_> {
    fn len(&self) -> usize {
        self.keys.len()
    }
    #[inline]
    fn at(&self, at: usize) -> PageHash {
        PageHash::of(self.scope, self.keys[at])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_of_wrong_length_is_refused_with_its_position() {
        assert!(check_keys(&[&[0; 8], &[0; 64]]).is_ok());
        let error = check_keys(&[&[0; 8], &[0; 65]]).unwrap_err().to_string();
        assert!(error.contains("key=1") && error.contains("bytes=65"), "{error}");
    }

    #[test]
    fn only_pairs_of_hex_digits_parse_as_a_key() {
        assert_eq!(parse_key("00fF10"), Some(vec![0, 255, 16]));
        assert_eq!(parse_key(""), Some(Vec::new()));
        for wrong in ["0", "0g", "+1", "0x12", "\u{e9}\u{e9}", " 1"] {
            assert_eq!(parse_key(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn equal_keys_in_two_scopes_have_different_hashes() {
        let (a, b) = (ScopeId([1; 16]), ScopeId([2; 16]));
        assert_ne!(PageHash::of(&a, b"12345678"), PageHash::of(&b, b"12345678"));
        assert_eq!(PageHash::of(&a, b"12345678"), PageHash::of(&a, b"12345678"));
    }
}

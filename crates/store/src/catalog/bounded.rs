//! Decodes lists and text up to a maximum length. A client may announce any length, and a list of
//! numbers may take many times the memory of its message.

use super::keys::{Keys, PackedKeys};
use ritornello_format::KeyList;
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::marker::PhantomData;

/// Decodes a list of at most `MAX` elements.
///
/// # Errors
/// If the list is longer, or an element cannot be decoded.
pub(super) fn list<'de, T, L, D, const MAX: usize>(deserializer: D) -> Result<L, D::Error>
where
    T: Deserialize<'de>,
    L: From<Vec<T>>,
    D: Deserializer<'de>,
{
    deserializer.deserialize_seq(List::<T, MAX>(PhantomData)).map(L::from)
}

struct List<T, const MAX: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for List<T, MAX> {
    type Value = Vec<T>;

    fn expecting(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(text, "a list of at most {MAX} elements")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Vec<T>, A::Error> {
        let mut list = Vec::new();
        while let Some(element) = elements.next_element()? {
            if list.len() == MAX {
                return Err(A::Error::invalid_length(MAX + 1, &self));
            }
            list.push(element);
        }
        Ok(list)
    }
}

/// Decodes text of at most `MAX` bytes.
///
/// # Errors
/// If the text is longer, or is not UTF-8.
pub(crate) fn text<'de, D: Deserializer<'de>, const MAX: usize>(
    deserializer: D,
) -> Result<String, D::Error> {
    let text = <&str>::deserialize(deserializer)?;
    if text.len() > MAX {
        return Err(D::Error::custom(format_args!("text of more than {MAX} bytes")));
    }
    Ok(text.to_owned())
}

/// Encodes and decodes a [`KeyList`] of at most `MAX` keys as [`Keys`].
pub(crate) struct PackedList<const MAX: usize>;

impl<const MAX: usize> PackedList<MAX> {
    /// Encodes `keys`.
    pub(crate) fn serialize<S: Serializer>(
        keys: &KeyList,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        Keys::Listed(&keys.iter().collect::<Vec<_>>()).serialize(serializer)
    }

    /// Decodes keys.
    ///
    /// # Errors
    /// If there are more than `MAX` keys, if their lengths and bytes do not agree, or if they have
    /// fewer than `KEY_BYTES_MIN` bytes on average.
    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<KeyList, D::Error> {
        let packed = PackedKeys::deserialize(deserializer)?;
        if packed.len() > MAX {
            return Err(D::Error::custom(format_args!("more than {MAX} keys")));
        }
        let keys = Keys::Packed(packed).list().map_err(D::Error::custom)?;
        Ok(keys.iter().collect())
    }
}

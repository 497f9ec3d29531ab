//! Decodes lists up to a maximum length. A client may announce any length, and a list of
//! numbers may take many times the memory of its message.

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
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

//! A list of page keys in one buffer.

use std::ops::Index;

/// Page keys in order, in one buffer: a list of any length has at most two allocations, and so has
/// its clone. A put or get of small pages has thousands of keys; if each key were an allocation,
/// freeing them would be slow once their memory has left the processor's cache.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct KeyList {
    bytes: Vec<u8>,
    /// For each key, the offset in `bytes` at which it ends.
    ends: Vec<usize>,
}

impl KeyList {
    /// Returns an empty list with memory for `keys` keys of `bytes` bytes in all.
    #[must_use]
    pub fn with_capacity(keys: usize, bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes), ends: Vec::with_capacity(keys) }
    }

    /// Appends `key`.
    pub fn push(&mut self, key: &[u8]) {
        self.bytes.extend_from_slice(key);
        self.ends.push(self.bytes.len());
    }

    /// Number of keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether the list has no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Bytes of all keys together.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Key number `at`, counted from zero; `None` after the last key.
    #[must_use]
    pub fn get(&self, at: usize) -> Option<&[u8]> {
        let end = *self.ends.get(at)?;
        let start = at.checked_sub(1).map_or(0, |before| self.ends[before]);
        self.bytes.get(start..end)
    }

    /// The last key; `None` if the list is empty.
    #[must_use]
    pub fn last(&self) -> Option<&[u8]> {
        self.get(self.len().checked_sub(1)?)
    }

    /// The keys in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        (0..self.len()).map(|at| &self[at])
    }
}

impl Index<usize> for KeyList {
    type Output = [u8];

    /// # Panics
    /// If the list has no key number `at`.
    fn index(&self, at: usize) -> &[u8] {
        let start = at.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start..self.ends[at]]
    }
}

impl<K: AsRef<[u8]>> FromIterator<K> for KeyList {
    fn from_iter<I: IntoIterator<Item = K>>(keys: I) -> Self {
        let mut list = Self::default();
        keys.into_iter().for_each(|key| list.push(key.as_ref()));
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn list_returns_the_keys_pushed(
            keys in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..20),
        ) {
            let list: KeyList = keys.iter().collect();
            prop_assert_eq!(list.iter().collect::<Vec<_>>(), keys.iter().collect::<Vec<_>>());
            prop_assert_eq!((list.len(), list.is_empty()), (keys.len(), keys.is_empty()));
            prop_assert_eq!(list.bytes(), keys.concat().len());
            for (at, key) in keys.iter().enumerate() {
                prop_assert_eq!(list.get(at), Some(key.as_slice()));
            }
            prop_assert_eq!(list.get(keys.len()), None);
            prop_assert_eq!(list.last(), keys.last().map(Vec::as_slice));
        }
    }
}

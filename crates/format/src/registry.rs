//! The scope registry: the scopes of a store and their slots.
//!
//! The file begins with the head: the registry at the time when the file was written, encoded as a
//! whole-file record (module `whole_file`). Most later registrations and drops append a record, so
//! that their cost does not depend on the number of scopes. Other changes replace the file: for
//! example each change of settings, and a change after which the obsolete bytes would exceed the
//! bytes of live scopes by more than 64 KiB.

use crate::whole_file::{SEAL_BYTES, seal, unseal};
use crate::wire::{Reader, Writer};
use crate::{Error, Result, Scope, ScopeSlot, checksum};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

const MAGIC: &[u8; 8] = b"RTRNSCOP";
/// Kinds of appended records.
const REGISTERED: u8 = 1;
const DROPPED: u8 = 2;

/// A user's settings of one scope. `None` means the store's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScopeSettings {
    /// The codec of pages that are put: see [`Slice::codec`](crate::Slice::codec).
    pub codec: Option<u8>,
    /// Maximum bytes on disk that the scope's pages take.
    pub quota_bytes: Option<u64>,
    /// Maximum bytes on disk that the scope's retained pages take.
    pub retained_bytes: Option<u64>,
}

impl ScopeSettings {
    /// Encodes a bit per field, set if the field is `Some`, then all fields, zero where they are
    /// `None`.
    fn encode(&self) -> Writer {
        let given =
            [self.codec.is_some(), self.quota_bytes.is_some(), self.retained_bytes.is_some()];
        let bits = given.iter().rev().fold(0u8, |bits, given| bits << 1 | u8::from(*given));
        let mut entry = Writer::new();
        entry
            .u8(bits)
            .u8(self.codec.unwrap_or_default())
            .u64(self.quota_bytes.unwrap_or_default())
            .u64(self.retained_bytes.unwrap_or_default());
        entry
    }

    fn decode(entry: &[u8]) -> Result<Self> {
        let mut reader = Reader::new(entry);
        let bits = reader.u8()?;
        let (codec, quota, retained) = (reader.u8()?, reader.u64()?, reader.u64()?);
        Ok(Self {
            codec: (bits & 1 != 0).then_some(codec),
            quota_bytes: (bits & 2 != 0).then_some(quota),
            retained_bytes: (bits & 4 != 0).then_some(retained),
        })
    }
}

/// The registered scopes and the next free slot. If a slot below `next` is not listed, its scope
/// was dropped or its registration failed, and runs that name the slot are dropped too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScopeRegistry {
    /// The slot of the next registration. `next` decreases only if records of the file were lost;
    /// the opening of the store then raises it above the slots of all runs in the index.
    pub next: u32,
    /// The registered scopes that were not dropped.
    pub scopes: BTreeMap<ScopeSlot, Arc<Scope>>,
    /// Settings of the scopes whose settings were changed from the store's defaults.
    pub settings: BTreeMap<ScopeSlot, ScopeSettings>,
}

/// The content of a registry file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredRegistry {
    /// The registry in the head, changed by the records after it, up to the first damaged record.
    pub registry: ScopeRegistry,
    /// Length of the head, in bytes.
    pub head_bytes: usize,
    /// Number of bytes after the head, damaged records included.
    pub appended_bytes: usize,
    /// Whether all bytes belong to intact records. If false, the last append was torn or records
    /// are damaged, and `registry.next` may be lower than before the damage.
    pub is_whole: bool,
}

impl ScopeRegistry {
    /// Encodes the head, a whole-file record. Body: [`Scope::IDENTITY`]; next slot; number of
    /// scopes, then slot and description of each; number of settings, then slot and settings of
    /// each. Descriptions and settings are blobs: length `u32`, then bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Writer::new();
        body.u8(Scope::IDENTITY).u32(self.next).u32(self.scopes.len() as u32);
        for (slot, scope) in &self.scopes {
            let mut entry = Writer::new();
            scope.encode(&mut entry);
            body.u32(slot.0).blob(entry.as_slice());
        }
        body.u32(self.settings.len() as u32);
        for (slot, settings) in &self.settings {
            body.u32(slot.0).blob(settings.encode().as_slice());
        }
        seal(MAGIC, body.as_slice())
    }

    /// The record to append when `scope` is registered under `slot`.
    #[must_use]
    pub fn registration(slot: ScopeSlot, scope: &Scope) -> Vec<u8> {
        let mut body = Writer::new();
        body.u8(REGISTERED).u32(slot.0);
        scope.encode(&mut body);
        record(&body)
    }

    /// The record to append when the scopes in `slots` are dropped.
    #[must_use]
    pub fn removal(slots: &[ScopeSlot]) -> Vec<u8> {
        let mut body = Writer::new();
        body.u8(DROPPED).u32(slots.len() as u32);
        for slot in slots {
            body.u32(slot.0);
        }
        record(&body)
    }

    /// Decodes a file: the head, and the records after it up to the first record that is cut,
    /// damaged or out of order.
    ///
    /// # Errors
    /// `Invalid` if the file is not a registry, or of another version or with unknown features;
    /// `Fatal` if the head is damaged; `Miss` if the fields of an intact head are malformed, or if
    /// it has scopes and another [`Scope::IDENTITY`]: this build computes other ids for these
    /// scopes, under which none of their pages would be found.
    pub fn decode(bytes: &[u8]) -> Result<StoredRegistry> {
        let body = unseal(MAGIC, "scope registry", bytes)?;
        let mut registry = Self::decode_head(body)?;
        let head_bytes = SEAL_BYTES + body.len();
        let appended = bytes.get(head_bytes..).unwrap_or_default();
        let mut reader = Reader::new(appended);
        let mut unread = reader.remaining();
        while unread > 0 && registry.replay(&mut reader).is_ok() {
            unread = reader.remaining();
        }
        let appended_bytes = appended.len();
        Ok(StoredRegistry { registry, head_bytes, appended_bytes, is_whole: unread == 0 })
    }

    fn decode_head(body: &[u8]) -> Result<Self> {
        let mut reader = Reader::new(body);
        let identity = reader.u8()?;
        let mut registry = Self { next: reader.u32()?, ..Self::default() };
        let scopes = reader.u32()?;
        if identity != Scope::IDENTITY && scopes > 0 {
            return Err(Error::miss(
                "the scope ids are of another version of Ritornello: no page can be found",
            )
            .with("scopes", scopes));
        }
        for _ in 0..scopes {
            let slot = ScopeSlot(reader.u32()?);
            let scope = Scope::decode(&mut Reader::new(reader.blob()?))?;
            registry.scopes.insert(slot, Arc::new(scope));
        }
        for _ in 0..reader.u32()? {
            let slot = ScopeSlot(reader.u32()?);
            registry.settings.insert(slot, ScopeSettings::decode(reader.blob()?)?);
        }
        Ok(registry)
    }

    /// Reads the next appended record and applies it. After an error the registry is unchanged.
    fn replay(&mut self, reader: &mut Reader<'_>) -> Result<()> {
        let damaged = || Error::miss("a record of the scope registry is damaged");
        let whole = reader.rest();
        let body = reader.blob()?;
        if reader.u64()? != checksum(&whole[..4 + body.len()]) {
            return Err(damaged());
        }
        let mut body = Reader::new(body);
        match body.u8()? {
            REGISTERED => {
                let slot = ScopeSlot(body.u32()?);
                let scope = Scope::decode(&mut body)?;
                let next = slot.0.checked_add(1).filter(|_| slot.0 >= self.next);
                self.next = next.ok_or_else(damaged)?;
                self.scopes.insert(slot, Arc::new(scope));
            }
            DROPPED => {
                let count = body.u32()?;
                let slots = (0..count).map(|_| body.u32().map(ScopeSlot));
                for slot in slots.collect::<Result<Vec<_>>>()? {
                    self.scopes.remove(&slot);
                    self.settings.remove(&slot);
                }
            }
            _ => return Err(damaged()),
        }
        Ok(())
    }
}

/// An appended record: length `u32` of the body, body, CRC-64 of length and body.
fn record(body: &Writer) -> Vec<u8> {
    let mut record = Writer::new();
    record.blob(body.as_slice());
    let sum = checksum(record.as_slice());
    record.u64(sum);
    record.into_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(name: &str) -> Scope {
        Scope::opaque(name, 4096, true)
    }

    fn registry() -> ScopeRegistry {
        let some = ScopeSettings { codec: Some(0), quota_bytes: None, retained_bytes: Some(7) };
        let others =
            ScopeSettings { codec: None, quota_bytes: Some(1 << 40), retained_bytes: None };
        ScopeRegistry {
            next: 9,
            scopes: BTreeMap::from([(ScopeSlot(3), Arc::new(scope("a")))]),
            settings: BTreeMap::from([(ScopeSlot(3), some), (ScopeSlot(4), others)]),
        }
    }

    #[test]
    fn head_round_trips_and_damage_is_refused() {
        let bytes = registry().encode();
        let head_bytes = bytes.len();
        let registry = registry();
        let stored = StoredRegistry { registry, head_bytes, appended_bytes: 0, is_whole: true };
        assert_eq!(ScopeRegistry::decode(&bytes).unwrap(), stored);
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 0x10;
            assert!(ScopeRegistry::decode(&bad).is_err(), "byte {at}");
        }
    }

    #[test]
    fn appended_records_are_applied_in_order() {
        let mut bytes = registry().encode();
        let head = bytes.len();
        bytes.extend(ScopeRegistry::registration(ScopeSlot(9), &scope("b")));
        bytes.extend(ScopeRegistry::registration(ScopeSlot(12), &scope("c")));
        bytes.extend(ScopeRegistry::removal(&[ScopeSlot(3), ScopeSlot(9)]));
        let stored = ScopeRegistry::decode(&bytes).unwrap();
        assert!(stored.is_whole && stored.appended_bytes == bytes.len() - head);
        let registry = stored.registry;
        assert_eq!(registry.next, 13);
        assert_eq!(registry.scopes, BTreeMap::from([(ScopeSlot(12), Arc::new(scope("c")))]));
        assert_eq!(registry.settings.keys().collect::<Vec<_>>(), [&ScopeSlot(4)]);
    }

    #[test]
    fn torn_record_leaves_earlier_records_readable() {
        let head = registry().encode();
        let first = ScopeRegistry::registration(ScopeSlot(9), &scope("b"));
        let second = ScopeRegistry::registration(ScopeSlot(10), &scope("c"));
        let bytes = [head.as_slice(), &first, &second].concat();
        let confirmed = head.len() + first.len();
        let expected = ScopeRegistry::decode(&bytes[..confirmed]).unwrap().registry;
        assert_eq!((expected.next, expected.scopes.len()), (10, 2));
        for cut in confirmed + 1..bytes.len() {
            let stored = ScopeRegistry::decode(&bytes[..cut]).unwrap();
            assert!(!stored.is_whole && stored.registry == expected, "cut at {cut}");
        }
        for at in confirmed..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 0x10;
            let stored = ScopeRegistry::decode(&bad).unwrap();
            assert!(!stored.is_whole && stored.registry == expected, "byte {at}");
        }
    }

    /// Slot 8 is below `next`, so it was assigned before, and its scope was dropped. No owner
    /// assigns a slot twice.
    #[test]
    fn registration_under_a_used_slot_is_refused() {
        let mut bytes = registry().encode();
        bytes.extend(ScopeRegistry::registration(ScopeSlot(8), &scope("b")));
        let stored = ScopeRegistry::decode(&bytes).unwrap();
        assert!(!stored.is_whole && stored.registry == registry());
    }

    #[test]
    fn registry_of_another_scope_id_version_is_a_miss() {
        let bytes = registry().encode();
        let mut body = unseal(MAGIC, "scope registry", &bytes).unwrap().to_vec();
        body[0] = Scope::IDENTITY + 1;
        let error = ScopeRegistry::decode(&seal(MAGIC, &body)).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Miss);
    }

    /// A later build may append fields to a scope, to its settings and to the body.
    #[test]
    fn appended_fields_are_ignored() {
        let (mut a, mut settings, mut body) = (Writer::new(), Writer::new(), Writer::new());
        scope("a").encode(&mut a);
        a.u64(1);
        settings.raw(&[0b1111_1101, 0]).u64(0).u64(7).u64(2);
        body.u8(Scope::IDENTITY).u32(9).u32(1).u32(3).blob(a.as_slice());
        body.u32(1).u32(3).blob(settings.as_slice()).u64(3);
        let mut expected = registry();
        expected.settings.remove(&ScopeSlot(4));
        let stored = ScopeRegistry::decode(&seal(MAGIC, body.as_slice())).unwrap();
        assert_eq!(stored.registry, expected);
    }
}

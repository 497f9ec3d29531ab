//! The scope registry: which scopes a store knows, under which slots.

use crate::manifest::{seal, unseal};
use crate::wire::{Reader, Writer};
use crate::{Error, Result, Scope, ScopeSlot};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

const MAGIC: &[u8; 8] = b"RTRNSCOP";

/// What a user chose for one scope. What is `None` is the store's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScopeSettings {
    /// How pages that are put are encoded: the number that a slice records.
    pub codec: Option<u8>,
    /// Bytes on disk that the scope's pages may take.
    pub quota_bytes: Option<u64>,
    /// Bytes on disk of pages that are retained.
    pub retained_bytes: Option<u64>,
}

impl ScopeSettings {
    /// Bits of the fields that are given (1), then all of them, zero where they are not.
    fn encode(&self, writer: &mut Writer) {
        let given =
            [self.codec.is_some(), self.quota_bytes.is_some(), self.retained_bytes.is_some()];
        let bits = given.iter().rev().fold(0u8, |bits, given| bits << 1 | u8::from(*given));
        writer
            .u8(bits)
            .u8(self.codec.unwrap_or_default())
            .u64(self.quota_bytes.unwrap_or_default())
            .u64(self.retained_bytes.unwrap_or_default());
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        let bits = reader.u8()?;
        if bits > 7 {
            return Err(Error::miss("the settings of a scope are malformed"));
        }
        let (codec, quota, retained) = (reader.u8()?, reader.u64()?, reader.u64()?);
        Ok(Self {
            codec: (bits & 1 != 0).then_some(codec),
            quota_bytes: (bits & 2 != 0).then_some(quota),
            retained_bytes: (bits & 4 != 0).then_some(retained),
        })
    }
}

/// The registered scopes and the next free slot. Rewritten whole at every change; a slot that is
/// not listed is dead, and so is every run that names it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScopeRegistry {
    /// The slot the next registration gets.
    pub next: u32,
    /// Live scopes.
    pub scopes: Vec<(ScopeSlot, Scope)>,
    /// Settings of those that have any.
    pub settings: BTreeMap<ScopeSlot, ScopeSettings>,
}

impl ScopeRegistry {
    /// The record: sealed like the manifest; body: next slot, count, then slot and scope of each,
    /// count, then slot and settings of each, then [`Scope::IDENTITY`].
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Writer::new();
        body.u32(self.next).u32(self.scopes.len() as u32);
        for (slot, scope) in &self.scopes {
            body.u32(slot.0);
            scope.encode(&mut body);
        }
        body.u32(self.settings.len() as u32);
        for (slot, settings) in &self.settings {
            body.u32(slot.0);
            settings.encode(&mut body);
        }
        body.u8(Scope::IDENTITY);
        seal(MAGIC, body.as_slice())
    }

    /// Reads what [`ScopeRegistry::encode`] wrote.
    ///
    /// # Errors
    /// `Invalid` or `Fatal`, see [`unseal`]; `Miss` for scopes whose ids were made in another way:
    /// no page that names them can be found, and no header of one verifies.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new(unseal(MAGIC, "scope registry", bytes)?);
        let mut registry = Self { next: reader.u32()?, ..Self::default() };
        for _ in 0..reader.u32()? {
            registry.scopes.push((ScopeSlot(reader.u32()?), Scope::decode(&mut reader)?));
        }
        // Registries from before there were settings end here.
        if reader.remaining() > 0 {
            for _ in 0..reader.u32()? {
                let slot = ScopeSlot(reader.u32()?);
                registry.settings.insert(slot, ScopeSettings::decode(&mut reader)?);
            }
        }
        // Registries of the first identity end here.
        let identity = if reader.remaining() > 0 { reader.u8()? } else { 0 };
        if identity != Scope::IDENTITY && !registry.scopes.is_empty() {
            return Err(Error::miss("its scopes have ids that another version of Ritornello made")
                .with("scopes", registry.scopes.len()));
        }
        Ok(registry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_comes_back_and_damage_is_seen() {
        let some = ScopeSettings { codec: Some(0), quota_bytes: None, retained_bytes: Some(7) };
        let others =
            ScopeSettings { codec: None, quota_bytes: Some(1 << 40), retained_bytes: None };
        let registry = ScopeRegistry {
            next: 9,
            scopes: vec![(ScopeSlot(3), Scope::opaque("a", 4096, true))],
            settings: BTreeMap::from([(ScopeSlot(3), some), (ScopeSlot(4), others)]),
        };
        let bytes = registry.encode();
        assert_eq!(ScopeRegistry::decode(&bytes).unwrap(), registry);
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 0x10;
            assert!(ScopeRegistry::decode(&bad).is_err(), "byte {at}");
        }
    }

    #[test]
    fn scopes_of_another_identity_are_a_miss() {
        let registry = ScopeRegistry {
            next: 1,
            scopes: vec![(ScopeSlot(0), Scope::opaque("a", 4096, true))],
            settings: BTreeMap::new(),
        };
        let bytes = registry.encode();
        let body = unseal(MAGIC, "scope registry", &bytes).unwrap();
        let first = seal(MAGIC, &body[..body.len() - 1]);
        let error = ScopeRegistry::decode(&first).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Miss);
    }
}

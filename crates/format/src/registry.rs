//! The scope registry: which scopes a store knows, under which slots.

use crate::manifest::{seal, unseal};
use crate::wire::{Reader, Writer};
use crate::{Result, Scope, ScopeSlot};

const MAGIC: &[u8; 8] = b"RTRNSCOP";

/// The registered scopes and the next free slot. Rewritten whole at every change; a slot that is
/// not listed is dead, and so is every run that names it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScopeRegistry {
    /// The slot the next registration gets.
    pub next: u32,
    /// Live scopes.
    pub scopes: Vec<(ScopeSlot, Scope)>,
}

impl ScopeRegistry {
    /// The record: sealed like the manifest; body: next slot, count, then slot and scope of each.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Writer::new();
        body.u32(self.next).u32(self.scopes.len() as u32);
        for (slot, scope) in &self.scopes {
            body.u32(slot.0);
            scope.encode(&mut body);
        }
        seal(MAGIC, body.as_slice())
    }

    /// Reads what [`ScopeRegistry::encode`] wrote.
    ///
    /// # Errors
    /// `Invalid` or `Fatal`, see [`unseal`].
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new(unseal(MAGIC, "scope registry", bytes)?);
        let mut registry = Self { next: reader.u32()?, scopes: Vec::new() };
        for _ in 0..reader.u32()? {
            registry.scopes.push((ScopeSlot(reader.u32()?), Scope::decode(&mut reader)?));
        }
        Ok(registry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_comes_back_and_damage_is_seen() {
        let registry =
            ScopeRegistry { next: 9, scopes: vec![(ScopeSlot(3), Scope::opaque("a", 4096, true))] };
        let bytes = registry.encode();
        assert_eq!(ScopeRegistry::decode(&bytes).unwrap(), registry);
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 0x10;
            assert!(ScopeRegistry::decode(&bad).is_err(), "byte {at}");
        }
    }
}

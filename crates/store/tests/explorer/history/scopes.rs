//! Scopes without pages, which fill the registry, as requests with new salts create them.

use super::History;
use crate::common::Open;
use ritornello_format::{Scope, ScopeSlot};
use ritornello_store::{Catalog, ClientId};

impl History {
    /// In one of three calls on average, creates one to three scopes, and in half of these calls
    /// drops one. The scopes' descriptions are long, so that the registry is soon full and its file
    /// is replaced.
    pub(super) fn make_scopes(&mut self, open: &Open) {
        if !self.extra_rng.one_in(3) {
            return;
        }
        let catalog = open.core.catalog_for(ClientId::LOCAL, "");
        let mut slots: Vec<ScopeSlot> = Vec::new();
        for _ in 0..=self.extra_rng.below(3) {
            self.salts += 1;
            slots.push(catalog.resolve(&salted(self.salts), true).unwrap().unwrap().slot);
        }
        assert!(slots.is_sorted(), "slots must ascend: {slots:?}");
        if self.extra_rng.one_in(2) {
            open.store
                .drop_scope(&salted(self.salts.saturating_sub(self.extra_rng.below(4))))
                .unwrap();
        }
    }
}

fn salted(salt: u64) -> Scope {
    Scope::opaque(&format!("salt {salt} {}", "x".repeat(6000)), 300, true)
}

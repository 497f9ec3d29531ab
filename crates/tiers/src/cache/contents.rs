//! The contents of the local tiers: calls about stored pages that move no bytes.

use super::cache::Cache;
use ritornello_format::{Result, Scope, check_keys};
use ritornello_store::StorePolicy;

impl Cache {
    /// Returns the policy of the lowest local tier, because this tier keeps pages longest.
    ///
    /// # Errors
    /// `Closed` in a forked child, and once the cache is closed.
    pub fn policy(&self) -> Result<StorePolicy> {
        self.check()?;
        let lowest = self.tiers.local.last();
        Ok(lowest.map(|tier| tier.node.policy().clone()).unwrap_or_default())
    }

    /// Returns for each page whether it is on a local tier, also for pages after a missing page.
    ///
    /// # Errors
    /// `Invalid` for an invalid key; `Closed`; errors of a tier's store.
    pub fn exists(&self, scope: &Scope, keys: &[&[u8]]) -> Result<Vec<bool>> {
        self.check()?;
        check_keys(keys)?;
        let mut present = vec![false; keys.len()];
        for tier in &self.tiers.local {
            let found = tier.store().exists(scope, keys)?;
            present.iter_mut().zip(found).for_each(|(present, found)| *present |= found);
        }
        Ok(present)
    }

    /// Records a use of the leading pages on each local tier; in an unchained scope, of every page
    /// present. Returns the largest number of leading pages that one tier has.
    ///
    /// # Errors
    /// `Invalid` for an invalid key; `Closed`; errors of a tier's store.
    pub fn touch(&self, scope: &Scope, keys: &[&[u8]]) -> Result<usize> {
        self.check()?;
        let mut most = 0;
        for tier in &self.tiers.local {
            most = most.max(tier.store().touch(scope, keys)?);
        }
        Ok(most)
    }
}

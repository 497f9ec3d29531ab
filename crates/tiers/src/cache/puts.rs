//! Puts: written to the first tier, and passed to the writers of the lower tiers.

use super::cache::Cache;
use super::pending_put::Spilled;
use super::prompt::PromptPages;
use ritornello_format::{Error, Result, Scope};
use ritornello_store::{PutOptions, Store, Ticket};
use ritornello_volume::page_memory::PageSource;
use ritornello_volume::staging::StagedPages;
use ritornello_volume::transfer::Control;
use std::sync::Arc;

/// A put to the first tier: its scope, keys and options, and the function that spills pages.
type FirstPut = (Arc<Scope>, Vec<Box<[u8]>>, PutOptions, Spill);
type Spill = Box<dyn FnOnce(usize, StagedPages) + Send>;

impl Cache {
    /// Starts to put pages `first..` of a prompt. `source` must not change until the ticket is
    /// done. `keys` holds the keys of the prompt, starting at its first page. A caller that knows
    /// only later keys of the prompt passes the key of the page before them as `options.parent`; in
    /// a chained scope the pages of such a put are not written to a remote. The first tier is
    /// written immediately, and the ticket reports this write; lower tiers are written in the
    /// background according to their policies. Pages that the first tier has no space for are
    /// written from staging to the write-through tiers, and to the second tier if it is write-back;
    /// no tier gets these pages if staging is more than half full.
    ///
    /// # Errors
    /// `Invalid` for invalid keys or page lengths, or if `first` exceeds the number of keys;
    /// `Retry` if too many tickets are pending; `Closed`.
    pub fn submit_put(
        &self,
        scope: Arc<Scope>,
        keys: Vec<Box<[u8]>>,
        first: usize,
        source: Arc<dyn PageSource>,
        options: PutOptions,
        control: Control,
    ) -> Result<Ticket> {
        // Without lower tiers no tier receives spilled pages.
        let spills = !self.lower.writers.is_empty();
        self.put(scope, keys, first, options, |store, (scope, keys, options, spill)| match spills {
            true => store.submit_put_or(scope, keys, source, options, control, spill),
            false => store.submit_put(scope, keys, source, options, control),
        })
    }

    /// Like `submit_put`, but the bytes are copied into staging before the call returns; pages
    /// that staging has no space for are skipped.
    ///
    /// # Errors
    /// Like `submit_put`.
    pub fn submit_put_copy(
        &self,
        scope: Arc<Scope>,
        keys: Vec<Box<[u8]>>,
        first: usize,
        source: &dyn PageSource,
        options: PutOptions,
        control: Control,
    ) -> Result<Ticket> {
        self.put(scope, keys, first, options, |store, (scope, keys, options, spill)| {
            store.submit_put_copy_or(scope, keys, source, options, control, spill)
        })
    }

    fn put(
        &self,
        scope: Arc<Scope>,
        keys: Vec<Box<[u8]>>,
        first: usize,
        options: PutOptions,
        submit: impl FnOnce(&Arc<Store>, FirstPut) -> Result<Ticket>,
    ) -> Result<Ticket> {
        self.check()?;
        if first > keys.len() {
            return Err(Error::invalid("the first page to put is after the end of the prompt")
                .with("first", first)
                .with("keys", keys.len()));
        }
        let first_tier = self.tiers.first();
        let pages = PromptPages::new(Arc::clone(&scope), keys, options.parent)?;
        let range = first..pages.len();
        let options = PutOptions { parent: pages.before(first).map(Into::into), ..options };
        let requested = pages.keys[range.clone()].to_vec();
        let spilled = Arc::<Spilled>::default();
        let spill: Spill = {
            let (lower, pages, spilled) =
                (Arc::clone(&self.lower), pages.clone(), Arc::clone(&spilled));
            Box::new(move |at, staged| lower.spill(&spilled, &pages, first + at, staged))
        };
        let ticket = submit(first_tier.store(), (scope, requested, options, spill))?;
        first_tier.rate.reserve_put(pages.bytes(range.len()), ticket.completion());
        self.lower.put(&pages, range, &ticket, &spilled);
        Ok(ticket)
    }
}

//! The cache: tiers of one list, opened together.

use super::figures::{CacheStats, snapshot};
use super::left::Left;
use super::policy::{PrefetchPolicy, WritePolicy};
use super::prompt::Pages;
use super::rate::Rate;
use super::shared::{Far, Shared};
use super::shelf::{self, Shelf};
use super::spec::{Place, TierSpec, host_dir};
use super::writer::After;
use crate::remote::RemoteTier;
use ritornello_format::residency::Tier;
use ritornello_format::{Error, ErrorKind, PageHash, Result, Scope};
use ritornello_store::{PutOptions, StorePolicy, Ticket, check_sections};
use ritornello_volume::memory::{PageSource, PageTarget};
use ritornello_volume::process_id;
use ritornello_volume::transfer::Control;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// Bytes that may wait to be written to a tier, if nothing else is said.
const WRITE_QUEUE: u64 = 512 << 20;
/// `flush` waits so long for what is to be written down, and `close`; threads that hang in a backend
/// are left behind then.
const FLUSH: Duration = Duration::from_secs(60);
const CLOSE: Duration = Duration::from_secs(5);
const CLOSE_CHECK: Duration = Duration::from_millis(5);

/// How a cache behaves.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// How long a request waits for what comes from a remote.
    pub prefetch: PrefetchPolicy,
    /// Bytes that may wait to be written to each tier; what is more is dropped.
    pub write_queue: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { prefetch: PrefetchPolicy::default(), write_queue: WRITE_QUEUE }
    }
}

/// See the [module](super).
#[derive(Debug)]
pub struct Cache {
    pub(super) shared: Arc<Shared>,
    process: u32,
}

impl Cache {
    /// Opens the tiers of a list. `far` opens a remote by its address, which is not to ask whether that
    /// answers: one that does not now costs hits, as one does that fails later.
    ///
    /// # Errors
    /// Those of a store that cannot be opened, and of `far`; `Invalid` for a list that is none.
    pub fn open(
        list: &[TierSpec],
        settings: &Settings,
        far: impl Fn(&str) -> Result<RemoteTier>,
    ) -> Result<Self> {
        let (mut shelves, mut remote) = (Vec::new(), None);
        for (at, spec) in list.iter().enumerate() {
            let (dir, capacity) = match &spec.place {
                Place::Remote(address) => {
                    let tier = far(address.expose())?;
                    remote = Some(Far { tier, write: spec.write, rate: Rate::new(spec.rate) });
                    continue;
                }
                Place::Host { dir, capacity } => {
                    (dir.clone().unwrap_or_else(|| host_dir(list)), Some(*capacity))
                }
                Place::Disk { dir, capacity } => (dir.clone(), *capacity),
            };
            let below = list.get(at + 1).is_some_and(|below| below.write == WritePolicy::Back);
            let node = shelf::open(spec.tier(), dir, capacity, below)?;
            let rate = Rate::new(spec.rate);
            let capacity = capacity.unwrap_or(u64::MAX);
            shelves.push(Shelf { tier: spec.tier(), node, capacity, write: spec.write, rate });
        }
        if shelves.is_empty() {
            return TierSpec::list::<&str>(&[]).and(Err(Error::invalid("a cache has tiers")));
        }
        let shared = Shared::new(shelves, remote, settings.prefetch, settings.write_queue);
        for (spec, cap) in list.iter().filter_map(|spec| Some((spec, spec.rate?))) {
            shared.gate(|gate| gate.capped(spec.tier(), cap));
        }
        Ok(Self { shared: Arc::new(shared), process: process_id() })
    }

    /// What the tiers of this machine permit: the policy of the lowest, which keeps pages longest.
    ///
    /// # Errors
    /// `Closed` in a forked child, and once the cache is closed.
    pub fn policy(&self) -> Result<StorePolicy> {
        self.check()?;
        let lowest = self.shared.shelves.last();
        Ok(lowest.map(|shelf| shelf.node.policy().clone()).unwrap_or_default())
    }

    /// Starts to read pages, from the fastest tier of this machine that has them. `target` belongs to
    /// the cache until the ticket is done. What was read from below the first tier is put there.
    /// `parent`: the page before the first, where there is one. Where `control` names sections of the
    /// pages, each is told as soon as all pages have it.
    ///
    /// # Errors
    /// `Invalid` for bad keys, sizes or sections; `Retry` if too many tickets wait; `Closed`.
    pub fn submit_get(
        &self,
        scope: Arc<Scope>,
        keys: Vec<Box<[u8]>>,
        parent: Option<Box<[u8]>>,
        target: Arc<dyn PageTarget>,
        control: Control,
    ) -> Result<Ticket> {
        self.check()?;
        check_sections(&scope, &control)?;
        let (shared, top) = (Arc::clone(&self.shared), self.shared.top());
        let bytes = keys.len() as u64 * scope.resolved_page_bytes()?;
        let loading = shared.slack.load(shared.slowest_of(&scope, &keys), bytes);
        if let Some(last) = keys.last() {
            let last = PageHash::of(&scope.id(), last);
            shared.stop_raising(|pages, range| {
                range.end.checked_sub(1).is_some_and(|end| pages.hashes[end] == last)
            });
        }
        top.store().submit_read(keys, target.len(), control, move |keys, control| {
            let outcome = shared.read(&scope, parent.as_deref(), keys, target.as_ref(), control);
            drop(loading);
            Ok(outcome)
        })
    }

    /// Starts to put pages `first..` of a prompt, whose bytes are copied before this returns; what
    /// finds no room for that is left out. `keys` are those of the prompt from its first page on. Who
    /// does not know them names the page before as `parent`, and then no remote hears of the pages.
    /// The first tier is written to at once, and the ticket says what came of it; those below as
    /// their policies have it, in the background. What has no room on the first tier goes to them from
    /// staging.
    ///
    /// # Errors
    /// Like [`submit_get`](Self::submit_get).
    pub fn submit_put(
        &self,
        scope: Arc<Scope>,
        keys: Vec<Box<[u8]>>,
        first: usize,
        source: &dyn PageSource,
        terms: PutOptions,
        control: Control,
    ) -> Result<Ticket> {
        self.check()?;
        if first > keys.len() {
            return Err(Error::invalid("the first page to put lies behind the prompt")
                .with("first", first)
                .with("keys", keys.len()));
        }
        let (shared, top) = (&self.shared, self.shared.top());
        let pages = Pages::new(Arc::clone(&scope), keys, terms.parent)?;
        let range = first..pages.len();
        let terms = PutOptions { parent: pages.before(first).map(Into::into), ..terms };
        let asked = pages.keys[range.clone()].to_vec();
        let left = Arc::<Left>::default();
        let keep = {
            let (shared, pages, left) = (Arc::clone(shared), pages.clone(), Arc::clone(&left));
            move |at, staged| shared.keep_left(&left, &pages, first + at, staged)
        };
        let ticket = top.store().submit_put_copy_or(scope, asked, source, terms, control, keep)?;
        top.rate.charge(pages.bytes(range.len()));
        shared.arrived(top.tier, &pages, range.clone());
        for link in shared.links.iter().filter(|link| link.to != top.tier) {
            // Who puts them had to: no tier may have kept what is known to be there.
            shared.table.forget(link.to, &pages.hashes, range.clone());
            if link.policy == WritePolicy::Through {
                let after = After { put: Some(ticket.clone()), left: Some(Arc::clone(&left)) };
                shared.write_down(link, &pages, range.clone(), after);
            }
        }
        Ok(ticket)
    }

    /// So many tokens were computed behind `before` others: the gate learns from it.
    pub fn learn_prefill(&self, before: u64, tokens: u64, took: Duration) {
        self.shared.gate(|gate| gate.computed(before, tokens, took));
    }

    /// So many bytes were loaded from a tier by another process for this one.
    pub fn learn_load(&self, tier: Tier, bytes: u64, took: Duration) {
        if bytes > 0 {
            self.shared.gate(|gate| gate.loaded(tier, bytes, took, self.shared.clock()));
        }
    }

    /// What was loaded here since the last call, for another process to [learn](Self::learn_load):
    /// bytes and seconds by tier.
    #[must_use]
    pub fn take_loads(&self) -> Vec<(Tier, u64, f64)> {
        let measured = self.shared.take_measured();
        let loads = Tier::ALL.into_iter().zip(measured).filter(|(_, (bytes, _))| *bytes > 0);
        loads.map(|(tier, (bytes, seconds))| (tier, bytes, seconds)).collect()
    }

    /// A load that was decided for took so long: for the figures. The times are the decision's.
    pub fn judge(&self, load: Duration, compute: Duration, recompute: Duration) {
        self.shared.counts.gate.judge(load, compute, recompute);
    }

    /// Figures.
    ///
    /// # Errors
    /// `Closed`.
    pub fn stats(&self) -> Result<CacheStats> {
        self.check()?;
        Ok(snapshot(&self.shared))
    }

    /// Waits until what is to be written down is, and makes what this machine keeps durable.
    ///
    /// # Errors
    /// `Retry` if a tier is too slow for that; those of the stores.
    pub fn flush(&self) -> Result<()> {
        self.check()?;
        let until = Instant::now() + FLUSH;
        let top = self.shared.top().tier;
        for link in self.shared.links.iter().filter(|link| link.to != top) {
            if link.policy == WritePolicy::Back {
                while self.shared.write_back(link, false) && link.drain(until) {}
            }
            if !link.drain(until) {
                return Err(Error::retry("a tier is too slow for what is to be written to it"));
            }
        }
        self.shared.shelves.iter().try_for_each(|shelf| shelf.store().flush())
    }

    /// Stops what goes on in the background, and closes the tiers. What waits to be written down is
    /// not waited for: `flush` before.
    ///
    /// # Errors
    /// Those of the stores.
    pub fn close(&self) -> Result<()> {
        if process_id() != self.process || self.shared.closing.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let shared = &self.shared;
        shared.prefetches.close();
        shared.links.iter().for_each(super::writer::Link::close);
        let until = Instant::now() + CLOSE;
        let running =
            || shared.prefetches.is_running() || shared.links.iter().any(|link| link.is_running());
        while running() && Instant::now() < until {
            thread::sleep(CLOSE_CHECK);
        }
        let closed: Vec<Result<()>> =
            shared.shelves.iter().map(|shelf| shelf.node.close()).collect();
        closed.into_iter().collect()
    }

    /// Refuses a cache that is closed, was opened before a fork, or has lost a tier for good.
    pub(super) fn check(&self) -> Result<()> {
        let why = if process_id() != self.process {
            "this cache was opened before a fork: open it again in the child"
        } else if self.shared.is_closing() {
            "the cache is closed: open it again"
        } else if self.shared.shelves.iter().any(|shelf| shelf.node.is_replaced()) {
            "another store has taken the place of a tier: open the cache again"
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::Closed, why))
    }

    /// Whether every call fails with `Closed`.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.check().is_err()
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        if process_id() == self.process {
            if let Err(error) = self.close() {
                tracing::error!(%error, "a cache was dropped and could not be closed");
            }
        } else {
            // A forked child has neither the threads nor the locks that all this relies on.
            std::mem::forget(Arc::clone(&self.shared));
        }
    }
}

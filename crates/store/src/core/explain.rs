//! Explains why pages are hits or misses.

use super::StoreCore;
use super::miss_causes::{Remembered, SCOPE_DROPPED, Unremembered};
use crate::catalog::ScopeRef;
use crate::explanation::{Answer, EXPLAINED_KEYS_MAX, Explanation, KeySpan, OtherScope};
use ritornello_format::{Error, PageHash, Result, Scope, ScopeId, ScopeSlot, check_keys};
use ritornello_index::RunId;
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Maximum scopes that are searched for the keys, the last registered first.
const SEARCHED_SCOPES_MAX: usize = 512;
/// Number of keys, spread over the unexplained keys, that are searched in each of at most
/// [`SEARCHED_SCOPES_MAX`] scopes.
const SAMPLES: usize = 4;
/// Maximum scopes with one of the sampled keys that are compared with the scope asked about.
const CANDIDATES_MAX: usize = 16;
/// Maximum scopes that an explanation names.
const OTHER_SCOPES_MAX: usize = 4;
/// Maximum pages of a reservation examined under one hold of the core state's lock.
const STEP_PAGES: usize = 1024;
const MICROS_PER_SECOND: u64 = 1_000_000;

/// Why one page is a hit or a miss: see [`KeySpan`].
#[derive(Clone, Debug)]
struct Reason {
    answer: Answer,
    detail: Cow<'static, str>,
    /// Time of the miss cause or the drop, in microseconds since the store was opened.
    time: Option<u64>,
}

impl From<Answer> for Reason {
    fn from(answer: Answer) -> Self {
        Self { answer, detail: Cow::Borrowed(""), time: None }
    }
}

impl From<std::result::Result<Remembered, Unremembered>> for Reason {
    fn from(remembered: std::result::Result<Remembered, Unremembered>) -> Self {
        match remembered {
            Ok(remembered) => {
                let (answer, detail) = remembered.answer();
                Self { answer, detail, time: Some(remembered.time) }
            }
            Err(why) => Self { detail: Cow::Borrowed(why.word()), ..Answer::Unknown.into() },
        }
    }
}

impl Reason {
    /// The scope was dropped at `time`.
    fn dropped(time: u64) -> Self {
        let (answer, detail) = (Answer::Removed, Cow::Borrowed(SCOPE_DROPPED));
        Self { answer, detail, time: Some(time) }
    }
}

impl StoreCore {
    /// Explains `keys` of the scope `id`: see
    /// [`Catalog::explain`](crate::catalog::Catalog::explain). Takes the core state's lock for
    /// short steps only. May wait for the lock of the scope registry, and so for the disk.
    pub(super) fn explain(
        &self,
        id: ScopeId,
        scope: Option<&Scope>,
        keys: &[&[u8]],
    ) -> Result<Explanation> {
        self.lifecycle.check_open()?;
        check_keys(keys)?;
        if keys.len() > EXPLAINED_KEYS_MAX {
            return Err(Error::invalid("too many keys to explain: pass fewer at a time")
                .with("keys", keys.len())
                .with("at_most", EXPLAINED_KEYS_MAX));
        }
        if scope.is_some_and(|scope| scope.id() != id) {
            return Err(Error::invalid(
                "the description is of another scope: pass the scope's own",
            ));
        }
        let registered = self.scopes.by_id(id);
        let hashes: Vec<PageHash> = keys.iter().map(|key| PageHash::of(&id, key)).collect();
        let reference = registered.as_ref().map(|(reference, _)| *reference);
        let mut reasons = self.explain_stored(reference, &hashes);
        self.explain_missing(reference, &hashes, &mut reasons);
        let dropped = self.miss_causes.dropped_at(id);
        if let Some(dropped) = dropped {
            // A cause before the drop is not why the page is missing: the page may have been stored
            // again. A cause in the microsecond of the drop is before the drop: a put after the
            // drop ends later, because the put first registers the scope again, durably.
            let is_older = |reason: &Reason| match reason.time {
                Some(time) => time <= dropped,
                None => reason.answer == Answer::Unknown && registered.is_none(),
            };
            reasons.iter_mut().filter(|reason| is_older(reason)).for_each(|reason| {
                *reason = Reason::dropped(dropped);
            });
        }
        let described = registered.as_ref().map(|(_, scope)| scope.as_ref()).or(scope);
        let other_scopes = self.find_in_other_scopes(id, described, keys, &mut reasons);
        if let Some(dropped) = dropped {
            let unknown = reasons.iter_mut().filter(|reason| reason.answer == Answer::Unknown);
            unknown.for_each(|reason| *reason = Reason::dropped(dropped));
        }
        let now = self.miss_causes.now();
        Ok(Explanation {
            spans: spans(reasons, now),
            other_scopes,
            is_registered: registered.is_some(),
            remembered_seconds: now / MICROS_PER_SECOND,
        })
    }

    /// Explains the pages that the index has; [`Answer::Unknown`] for other pages.
    fn explain_stored(&self, scope: Option<ScopeRef>, hashes: &[PageHash]) -> Vec<Reason> {
        let tier = self.segments.report().mode.tier();
        let mut absent: Option<(RunId, Reason)> = None;
        let mut is_prefix_delivered = true;
        let explained = hashes.iter().map(|hash| {
            let located = scope.and_then(|scope| self.index.locate(scope.slot, *hash));
            let is_chained = scope.is_some_and(|scope| scope.chained);
            let reason = match located {
                None => Answer::Unknown.into(),
                Some((run, _)) if self.hidden.is_absent(run) => match &absent {
                    Some((last, reason)) if *last == run => reason.clone(),
                    _ => absent.insert((run, self.explain_absent(run))).1.clone(),
                },
                Some((run, _))
                    if is_chained && (!is_prefix_delivered || self.hidden.contains(run)) =>
                {
                    Answer::BehindMissing.into()
                }
                Some(_) => Reason { detail: Cow::Borrowed(tier), ..Answer::Hit.into() },
            };
            is_prefix_delivered &= reason.answer == Answer::Hit;
            reason
        });
        explained.collect()
    }

    fn explain_absent(&self, run: RunId) -> Reason {
        let extents = self.index.place(run).map(|place| place.extents).unwrap_or_default();
        let manifest = self.shape.manifest();
        let why = self.state.lock().absence.reason(&extents, &manifest).unwrap_or_default();
        Reason { detail: Cow::Owned(why), ..Answer::AbsentVolume.into() }
    }

    /// Explains the pages that the index lacks: they are reserved or pending, or their miss cause
    /// is remembered, or not.
    fn explain_missing(
        &self,
        scope: Option<ScopeRef>,
        hashes: &[PageHash],
        reasons: &mut [Reason],
    ) {
        let is_missing = |(_, reason): &(&PageHash, &Reason)| reason.answer == Answer::Unknown;
        let missing = hashes.iter().zip(&*reasons).filter(is_missing);
        let missing: BTreeSet<PageHash> = missing.map(|(hash, _)| *hash).collect();
        if missing.is_empty() {
            return;
        }
        let reserved = scope.map(|scope| self.reserved(scope.slot, &missing)).unwrap_or_default();
        for (hash, reason) in hashes.iter().zip(reasons) {
            if reserved.contains(hash) {
                *reason = Answer::NotYetVisible.into();
            } else if !missing.contains(hash) {
                continue;
            } else if scope.is_some_and(|scope| self.index.locate(scope.slot, *hash).is_some()) {
                // The page was committed after the index was searched.
                *reason = Answer::NotYetVisible.into();
            } else {
                *reason = self.miss_causes.explain(*hash).into();
            }
        }
    }

    /// Returns which of the `wanted` pages have space in an open reservation or are pending. Lets
    /// waiting threads take the core state's lock after every [`STEP_PAGES`] pages.
    fn reserved(&self, slot: ScopeSlot, wanted: &BTreeSet<PageHash>) -> BTreeSet<PageHash> {
        let mut found = BTreeSet::new();
        let state = self.state.lock();
        let open = state.reservations.open().iter().filter(|(_, open)| open.scope.slot == slot);
        let numbers: Vec<u64> = open.map(|(number, _)| *number).collect();
        let mut pending: Vec<_> = state.reservations.pending(slot).collect();
        drop(state);
        for number in numbers {
            for step in 0.. {
                let state = self.state.lock();
                let Some(open) = state.reservations.open().get(&number) else { break };
                let mut pages = open.pages().skip(step * STEP_PAGES).take(STEP_PAGES).peekable();
                if pages.peek().is_none() {
                    break;
                }
                found.extend(pages.filter(|page| wanted.contains(page)));
            }
        }
        // A reservation that was open above may have been taken by a commit, which waits for a sync.
        pending.extend(self.state.lock().reservations.pending(slot));
        let pages = pending.iter().flat_map(|pages| pages.iter());
        found.extend(pages.filter(|page| wanted.contains(*page)));
        found
    }

    /// Explains pages that have no answer yet, if another scope has their keys. Prefers the scopes
    /// with the fewest differences from `asked`, the description of the scope `id` if it is known.
    fn find_in_other_scopes(
        &self,
        id: ScopeId,
        asked: Option<&Scope>,
        keys: &[&[u8]],
        reasons: &mut [Reason],
    ) -> Vec<OtherScope> {
        let is_unknown = |at: &usize| reasons[*at].answer == Answer::Unknown;
        let unknown: Vec<usize> = (0..keys.len()).filter(is_unknown).collect();
        let Some(last) = unknown.len().checked_sub(1) else { return Vec::new() };
        let mut samples: Vec<usize> =
            (0..SAMPLES).map(|number| unknown[number * last / (SAMPLES - 1)]).collect();
        samples.dedup();
        let has = |scope: &ScopeRef, at: usize| {
            self.index.locate(scope.slot, PageHash::of(&scope.id, keys[at])).is_some()
        };
        let scopes = self.scopes.newest(SEARCHED_SCOPES_MAX).into_iter();
        let mut candidates: Vec<_> = scopes
            .filter(|(scope, _)| scope.id != id)
            .map(|(scope, stored)| {
                (samples.iter().filter(|at| has(&scope, **at)).count(), scope, stored)
            })
            .filter(|(hits, ..)| *hits > 0)
            .take(CANDIDATES_MAX)
            .map(|(hits, scope, stored)| {
                let differs = asked.map(|asked| asked.differences(&stored));
                let fields = differs.as_ref().map_or(0, Vec::len);
                let (id, model) = (scope.id.to_string(), stored.model.clone());
                ((fields, Reverse(hits)), scope, OtherScope { id, model, differs })
            })
            .collect();
        candidates.sort_by_key(|(order, ..)| *order);
        candidates.truncate(OTHER_SCOPES_MAX);
        let mut named = BTreeSet::new();
        for at in unknown {
            if let Some((number, (_, _, other))) =
                (0..).zip(&candidates).find(|(_, (_, scope, _))| has(scope, at))
            {
                let detail = Cow::Owned(other.id.clone());
                reasons[at] = Reason { detail, ..Answer::OtherScope.into() };
                named.insert(number);
            }
        }
        let others = (0..).zip(candidates).filter(|(number, _)| named.contains(number));
        others.map(|(_, (_, _, other))| other).collect()
    }
}

/// Joins consecutive pages with the same answer and detail. A span's age is the time from its first
/// page's [`Reason::time`] to `now`; both are in microseconds since the store was opened.
fn spans(reasons: Vec<Reason>, now: u64) -> Vec<KeySpan> {
    let mut spans: Vec<KeySpan> = Vec::new();
    for (at, Reason { answer, detail, time }) in (0..).zip(reasons) {
        match spans.last_mut() {
            Some(last) if last.answer == answer && last.detail == detail => last.pages += 1,
            _ => {
                let detail = detail.into_owned();
                let seconds_ago = time.map(|time| now.saturating_sub(time) / MICROS_PER_SECOND);
                spans.push(KeySpan { at, pages: 1, answer, detail, seconds_ago });
            }
        }
    }
    spans
}

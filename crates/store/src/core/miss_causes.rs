//! Why pages are not stored: evictions, removals, damage, refusals and abandoned puts that this
//! owner remembers.
//!
//! The hash of a page selects a bucket of a fixed table. In a full bucket a new entry overwrites
//! the oldest. An entry has 64 bits of the hash, so the probability that an answer is about another
//! page is at most 2^-62. The table takes at most [`TABLE_BYTES_MAX`]. Dropped scopes are
//! remembered as scopes, because their pages would displace all other entries.

use super::eviction_cause::EvictionCause;
use crate::catalog::Refusal;
use crate::eviction::PolicyKind;
use crate::explanation::Answer;
use parking_lot::Mutex;
use ritornello_format::{PageHash, ScopeId};
use ritornello_index::Removed;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::time::Instant;

/// Maximum bytes of the table: 2^19 entries of 16 bytes.
const TABLE_BYTES_MAX: usize = 8 << 20;
/// The table has an entry for each page that the store would hold if each had this length, up to
/// [`TABLE_BYTES_MAX`].
const ENTRY_PAGE_BYTES: u64 = 16 << 10;
/// Entries of a bucket, which is as long as a cache line.
const WAYS: usize = 4;
const BUCKETS_MAX: usize = TABLE_BYTES_MAX / size_of::<Bucket>();
/// Maximum dropped scopes that are remembered.
const SCOPES_MAX: usize = 1024;
/// Lowest bits of [`Entry`]'s second word, which have the number of the cause.
const CAUSE_BITS: u32 = 5;
/// Bits above the cause, which have the number of the policy; the other bits have the time.
const POLICY_BITS: u32 = 3;
const _: () = assert!(MissCause::ALL.len() < 1 << CAUSE_BITS);
const _: () = assert!(PolicyKind::ALL.len() < 1 << POLICY_BITS);
/// The detail of [`Answer::Removed`] for a page of a dropped scope.
pub(in crate::core) const SCOPE_DROPPED: &str = "scope_dropped";

/// The high half of a page's hash; then a [`Remembered`] in one word, which is zero in an unused
/// entry.
type Entry = [u64; 2];

/// The newest entry first.
type Bucket = [Entry; WAYS];

/// Why a page is not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core) enum MissCause {
    Evicted(EvictionCause),
    Deleted,
    /// The page was in an absent directory that was forgotten.
    DirectoryForgotten,
    FailedVerification,
    /// When the page's absent volume or segment returned, the page's space was in use, or its
    /// segment did not exist.
    SpaceLost,
    Refused(Refusal),
    Abandoned,
}

/// Gives each cause its number in an [`Entry`]. The compiler refuses a list that lacks a cause.
macro_rules! numbers {
    ($($number:literal => $cause:ident $(($of:ident::$word:ident))?,)*) => {
        impl MissCause {
            const ALL: [Self; [$($number),*].len()] = [$(Self::$cause $(($of::$word))?),*];

            const fn number(self) -> u64 {
                match self {
                    $(Self::$cause $(($of::$word))? => $number,)*
                }
            }

            const fn numbered(number: u64) -> Option<Self> {
                match number {
                    $($number => Some(Self::$cause $(($of::$word))?),)*
                    _ => None,
                }
            }
        }
    };
}

numbers! {
    1 => Evicted(EvictionCause::Space),
    2 => Evicted(EvictionCause::Quota),
    3 => Evicted(EvictionCause::Index),
    4 => Evicted(EvictionCause::Segment),
    5 => Deleted,
    6 => DirectoryForgotten,
    7 => FailedVerification,
    8 => SpaceLost,
    9 => Refused(Refusal::NoSpace),
    10 => Refused(Refusal::Deadline),
    11 => Refused(Refusal::Metadata),
    12 => Refused(Refusal::Quota),
    13 => Refused(Refusal::Admission),
    14 => Refused(Refusal::WriteBudget),
    15 => Refused(Refusal::IndexMemory),
    16 => Refused(Refusal::Absent),
    17 => Abandoned,
}

impl MissCause {
    /// The answer, and its detail without a policy.
    const fn answer(self) -> (Answer, &'static str) {
        match self {
            Self::Evicted(cause) => (Answer::Evicted, cause.word()),
            Self::Deleted => (Answer::Removed, "deleted"),
            Self::DirectoryForgotten => (Answer::Removed, "directory_forgotten"),
            Self::FailedVerification => (Answer::Damaged, "verification"),
            Self::SpaceLost => (Answer::Damaged, "space"),
            Self::Refused(refusal) => (Answer::Refused, refusal.word()),
            Self::Abandoned => (Answer::Abandoned, ""),
        }
    }
}

/// A miss cause as the table has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core) struct Remembered {
    cause: MissCause,
    /// The policy by which the page was chosen for eviction: for `adaptive`, the policy that it
    /// followed then. `None` if no policy chose the page.
    policy: Option<PolicyKind>,
    /// Microseconds since the store was opened.
    pub(in crate::core) time: u64,
}

impl Remembered {
    const fn encode(self) -> u64 {
        let policy = match self.policy {
            None => 0,
            Some(policy) => policy as u64 + 1,
        };
        (self.time << POLICY_BITS | policy) << CAUSE_BITS | self.cause.number()
    }

    /// Reads the second word of an [`Entry`] in use.
    fn decode(value: u64) -> Option<Self> {
        let cause = MissCause::numbered(value & ((1 << CAUSE_BITS) - 1))?;
        let policy = (value >> CAUSE_BITS) as usize & ((1 << POLICY_BITS) - 1);
        let policy = policy.checked_sub(1).and_then(|at| PolicyKind::ALL.get(at).copied());
        Some(Self { cause, policy, time: value >> (CAUSE_BITS + POLICY_BITS) })
    }

    /// The answer, and its detail.
    pub(in crate::core) fn answer(self) -> (Answer, Cow<'static, str>) {
        let (answer, word) = self.cause.answer();
        let detail = self.policy.map(|policy| format!("{word} by {}", policy.word()));
        (answer, detail.map_or(Cow::Borrowed(word), Cow::Owned))
    }
}

/// Why no miss cause of a page is remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core) enum Unremembered {
    /// The table and the list of dropped scopes have overwritten nothing that could be about the
    /// page. So if the page is neither stored nor reserved, and its scope was not dropped, no put
    /// has asked for space for it since the store was opened, except with an error.
    NotOffered,
    /// The page's cause, or the drop of its scope, may have been overwritten.
    Forgotten,
}

impl Unremembered {
    /// The detail of [`Answer::Unknown`].
    pub(in crate::core) const fn word(self) -> &'static str {
        match self {
            Self::NotOffered => "not_offered",
            Self::Forgotten => "forgotten",
        }
    }
}

/// Returns all answers that an owner remembers, each with its detail.
pub fn remembered_answers() -> impl Iterator<Item = (Answer, Cow<'static, str>)> {
    let all = MissCause::ALL.into_iter().flat_map(|cause| {
        let is_by_policy = matches!(cause, MissCause::Evicted(cause) if cause.is_by_policy());
        let none = (!is_by_policy).then_some(None);
        let policies = PolicyKind::ALL.into_iter().filter(move |policy| {
            // `adaptive` follows another policy, which is remembered.
            is_by_policy && *policy != PolicyKind::Adaptive
        });
        let policies = none.into_iter().chain(policies.map(Some));
        policies.map(move |policy| Remembered { cause, policy, time: 0 }.answer())
    });
    all.chain([(Answer::Removed, Cow::Borrowed(SCOPE_DROPPED))])
}

/// The miss causes since the store was opened. Times are in microseconds from the opening. The
/// locks are the last in the lock order, and are held only while a bucket or the list of scopes is
/// read or changed.
#[derive(Debug)]
pub(in crate::core) struct MissCauses {
    opened: Instant,
    table: Mutex<Vec<Bucket>>,
    scopes: Mutex<DroppedScopes>,
}

#[derive(Debug, Default)]
struct DroppedScopes {
    /// The dropped scopes, each with the time of the drop; the newest last.
    newest: VecDeque<(ScopeId, u64)>,
    /// Whether a dropped scope was removed from the list to make room for another scope.
    forgot: bool,
}

impl MissCauses {
    /// The miss causes of a store that is opened with a capacity of `capacity` bytes.
    pub(in crate::core) fn new(capacity: u64) -> Self {
        let buckets = capacity / ENTRY_PAGE_BYTES / WAYS as u64;
        let buckets = usize::try_from(buckets).unwrap_or(usize::MAX).clamp(1, BUCKETS_MAX);
        // Memory of zeroes is reserved, and not touched before its use.
        let table = Mutex::new(vec![[[0; 2]; WAYS]; buckets]);
        Self { opened: Instant::now(), table, scopes: Mutex::default() }
    }

    /// Microseconds since the store was opened.
    pub(in crate::core) fn now(&self) -> u64 {
        self.opened.elapsed().as_micros() as u64
    }

    /// Records why `pages` are not stored. Skips [`PageHash::NONE`].
    pub(in crate::core) fn note(
        &self,
        pages: impl IntoIterator<Item = PageHash>,
        cause: MissCause,
    ) {
        self.note_at(pages, cause, self.now());
    }

    /// Records that the index removed pages.
    pub(in crate::core) fn note_removed(&self, removed: &[Removed], cause: MissCause) {
        self.note(hashes(removed), cause);
    }

    /// Records that the index removed pages that an eviction policy chose. `policy` is the policy
    /// that was followed.
    pub(in crate::core) fn note_evicted(
        &self,
        removed: &[Removed],
        cause: EvictionCause,
        policy: Option<PolicyKind>,
    ) {
        let cause = MissCause::Evicted(cause);
        self.remember(hashes(removed), Remembered { cause, policy, time: self.now() });
    }

    fn note_at(&self, pages: impl IntoIterator<Item = PageHash>, cause: MissCause, time: u64) {
        self.remember(pages, Remembered { cause, policy: None, time });
    }

    fn remember(&self, pages: impl IntoIterator<Item = PageHash>, remembered: Remembered) {
        let value = remembered.encode();
        for page in pages.into_iter().filter(|page| *page != PageHash::NONE) {
            // Lock the table anew for each page: a lock that no thread waits for costs less than
            // the memory access, and an explanation of misses, which reads one bucket under the
            // lock, hardly delays an eviction.
            let mut table = self.table.lock();
            let at = bucket_of(page, table.len());
            let bucket = &mut table[at];
            let same = bucket.iter().position(|entry| is_of(entry, page));
            bucket[..=same.unwrap_or(WAYS - 1)].rotate_right(1);
            bucket[0] = [page.high(), value];
        }
    }

    /// The last miss cause of a page; `None` if none is remembered.
    pub(in crate::core) fn of(&self, page: PageHash) -> Option<Remembered> {
        find(&self.bucket(page), page)
    }

    /// The last miss cause of a page, or why none is remembered.
    pub(in crate::core) fn explain(&self, page: PageHash) -> Result<Remembered, Unremembered> {
        let bucket = self.bucket(page);
        find(&bucket, page).ok_or_else(|| {
            // Entries are never cleared, so no entry of a bucket with an unused entry was
            // overwritten by another page.
            let is_full = bucket.iter().all(|[_, value]| *value != 0);
            let forgot = is_full || self.scopes.lock().forgot;
            if forgot { Unremembered::Forgotten } else { Unremembered::NotOffered }
        })
    }

    /// Copies the bucket that the hash of `page` selects.
    fn bucket(&self, page: PageHash) -> Bucket {
        let table = self.table.lock();
        table[bucket_of(page, table.len())]
    }

    /// The answer of a page's last miss cause, or [`Answer::Removed`] if its scope was dropped
    /// since. [`Answer::Unknown`] if no cause is remembered: the page may have been dropped with
    /// its scope, never offered, or displaced from the table.
    pub(in crate::core) fn answer(&self, scope: ScopeId, page: PageHash) -> Answer {
        let Some(Remembered { cause, time, .. }) = self.of(page) else { return Answer::Unknown };
        let is_older = self.dropped_at(scope).is_some_and(|dropped| time <= dropped);
        if is_older { Answer::Removed } else { cause.answer().0 }
    }

    /// Records that a scope was dropped with its pages.
    pub(in crate::core) fn note_dropped(&self, id: ScopeId) {
        let time = self.now();
        let mut scopes = self.scopes.lock();
        scopes.newest.retain(|(dropped, _)| *dropped != id);
        if scopes.newest.len() == SCOPES_MAX {
            scopes.newest.pop_front();
            scopes.forgot = true;
        }
        scopes.newest.push_back((id, time));
    }

    /// The time at which the scope with this id was last dropped; `None` if no drop is remembered.
    pub(in crate::core) fn dropped_at(&self, id: ScopeId) -> Option<u64> {
        let scopes = self.scopes.lock();
        scopes.newest.iter().find(|(dropped, _)| *dropped == id).map(|(_, time)| *time)
    }
}

fn find(bucket: &Bucket, page: PageHash) -> Option<Remembered> {
    let [_, value] = bucket.iter().find(|entry| is_of(entry, page))?;
    Remembered::decode(*value)
}

fn hashes(removed: &[Removed]) -> impl Iterator<Item = PageHash> {
    removed.iter().flat_map(|gone| &gone.hashes).copied()
}

fn bucket_of(page: PageHash, buckets: usize) -> usize {
    page.low() as usize % buckets
}

fn is_of([high, value]: &Entry, page: PageHash) -> bool {
    *high == page.high() && *value != 0
}

#[cfg(test)]
mod tests;

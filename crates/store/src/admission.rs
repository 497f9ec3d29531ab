//! Admission: decides which pages are worth the wear of a write.
//!
//! [`Admission`] is a state machine without I/O, locks or a clock. Each put with missing pages
//! calls [`Admission::decide`] once per reservation, with the missing pages that its scope's quota
//! allows, in sequence order. The result is the number of *leading* pages that may be written: in a
//! chained scope a page after a refused page could never be hit.
//!
//! * **Write-through** admits every page.
//! * **Second sight** admits a page if the page's hash is in a *ghost list*: the hashes of recently
//!   refused pages, kept without their bytes. On chat traffic most pages are never requested again:
//!   second sight writes a fifth of the bytes that write-through writes, and has three quarters of
//!   the hits of write-through.
//! * A **write budget** is a token bucket: it fills at the budgeted rate and holds at most the
//!   budget of an hour. Admitted pages take their bytes from the bucket, and an empty bucket admits
//!   nothing. Over any span of time, the bytes of admitted pages are therefore at most the budget
//!   of the span plus one bucket plus one page: the last admitted page may be longer than the rest
//!   of the bucket.
//! * **Auto** writes through without a budget. With a budget it writes through while the bucket is
//!   more than a quarter full, and requires a second sight otherwise.
//!
//! Neither the ghost list nor the bucket is persistent: after a restart the list is empty and the
//! bucket half full.

use ritornello_format::{Error, PageHash, Result, parse_bytes};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::time::Duration;

/// Capacity of the bucket, in seconds of the budgeted rate.
const BURST_SECONDS: f64 = 3600.0;
/// Share of the write budget's bucket that is full at the start.
const FIRST_FILL: f64 = 0.5;
/// Share of the write budget's bucket above which `auto` writes every page.
const WRITE_THROUGH_LEVEL: f64 = 0.25;
/// Maximum pages in a ghost list, which takes less than 32 MiB of memory.
pub const GHOST_PAGES_MAX: usize = 1 << 20;

/// Which pages of a put are admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum AdmissionMode {
    /// Write-through while the bucket of the write budget is more than a quarter full, or without a
    /// budget; otherwise second sight.
    #[default]
    Auto,
    /// Every page, until the budget is used up.
    WriteThrough,
    /// Pages that were refused recently and are put again, until the budget is used up.
    SecondSight,
}

impl AdmissionMode {
    /// The name users type.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::WriteThrough => "write_through",
            Self::SecondSight => "second_sight",
        }
    }

    /// Reads the name users type.
    ///
    /// # Errors
    /// `Invalid`, listing the names.
    pub fn parse(word: &str) -> Result<Self> {
        match word {
            "auto" => Ok(Self::Auto),
            "write_through" => Ok(Self::WriteThrough),
            "second_sight" => Ok(Self::SecondSight),
            _ => {
                Err(Error::invalid("admission is \"auto\", \"write_through\" or \"second_sight\"")
                    .with("given", word))
            }
        }
    }
}

/// Bytes that may be written per span of time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WriteBudget {
    bytes_per_second: f64,
}

impl WriteBudget {
    /// A budget of `bytes` per day. Zero allows no writes; reads continue.
    #[must_use]
    pub fn per_day(bytes: u64) -> Self {
        Self { bytes_per_second: bytes as f64 / 86_400.0 }
    }

    /// Parses a size and a span: `2TB/day`, `500GiB/hour`, `20MB/s`. A size alone is per day.
    ///
    /// # Errors
    /// `Invalid`, saying what to write instead.
    pub fn parse(text: &str) -> Result<Self> {
        let (size, span) = text.split_once('/').unwrap_or((text, "day"));
        let seconds = match span.trim() {
            "s" | "second" => 1.0,
            "hour" | "h" => 3600.0,
            "day" | "d" => 86_400.0,
            _ => {
                let advice =
                    "a write budget is a size and a span, such as 2TB/day, 500GiB/hour or 20MB/s";
                return Err(Error::invalid(advice).with("given", format!("{text:?}")));
            }
        };
        Ok(Self { bytes_per_second: parse_bytes(size)? as f64 / seconds })
    }

    /// Bytes per second.
    #[must_use]
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes_per_second
    }
}

/// The reason why the first refused page of a put was refused. All later pages of the put are
/// refused with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmissionRefusal {
    /// The ghost list does not hold the page: it was not refused recently.
    FirstSight,
    /// The write budget is used up.
    Budget,
}

/// The result of [`Admission::decide`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionDecision {
    /// Leading pages that may be written.
    pub pages: usize,
    /// Why the page after the leading `pages` may not be written; `None` if all pages may be
    /// written.
    pub refused: Option<AdmissionRefusal>,
}

/// Decides which pages of a put may be written. [`Admission::decide`] takes `now`, the time since a
/// fixed moment. The bucket does not fill while `now` is earlier than in a previous call.
#[derive(Debug)]
pub struct Admission {
    mode: AdmissionMode,
    bucket: Option<Bucket>,
    ghost: Ghost,
}

#[derive(Debug)]
struct Bucket {
    budget: WriteBudget,
    /// Bytes that may be written now. The level may be negative by less than a page: the last
    /// admitted page may be longer than the remaining level, so that even a small budget admits
    /// long pages.
    level: f64,
    filled: Duration,
}

impl Bucket {
    fn size(&self) -> f64 {
        self.budget.bytes_per_second * BURST_SECONDS
    }

    fn fill(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.filled).as_secs_f64();
        self.level = (self.level + passed * self.budget.bytes_per_second).min(self.size());
        self.filled = self.filled.max(now);
    }
}

/// Two sets of hashes. When the younger set is full, it replaces the older set. A page thus stays
/// in the list while less than half of the list's maximum number of pages are added after it. The
/// list records no order.
#[derive(Debug)]
struct Ghost {
    young: HashSet<u64>,
    old: HashSet<u64>,
    half: usize,
}

impl Ghost {
    /// Removes `page`. Returns whether it was in the list.
    fn take(&mut self, page: u64) -> bool {
        self.young.remove(&page) | self.old.remove(&page)
    }

    fn knows(&self, page: u64) -> bool {
        self.young.contains(&page) || self.old.contains(&page)
    }

    fn remember(&mut self, page: u64) {
        if self.young.len() >= self.half {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(page);
    }
}

impl Admission {
    /// Creates a state machine. Its ghost list holds at most `ghost_pages` pages, raised to two or
    /// lowered to [`GHOST_PAGES_MAX`] if need be.
    #[must_use]
    pub fn new(mode: AdmissionMode, budget: Option<WriteBudget>, ghost_pages: usize) -> Self {
        let bucket = budget.map(|budget| {
            let level = budget.bytes_per_second * BURST_SECONDS * FIRST_FILL;
            Bucket { budget, level, filled: Duration::ZERO }
        });
        let half = (ghost_pages.min(GHOST_PAGES_MAX) / 2).max(1);
        let ghost = Ghost { young: HashSet::new(), old: HashSet::new(), half };
        Self { mode, bucket, ghost }
    }

    /// Decides on a put's missing `pages`, each `page_bytes` long on disk, and charges the budget
    /// for admitted pages.
    pub fn decide(
        &mut self,
        pages: impl ExactSizeIterator<Item = PageHash>,
        page_bytes: u64,
        now: Duration,
    ) -> AdmissionDecision {
        let requested = pages.len();
        if let Some(bucket) = &mut self.bucket {
            bucket.fill(now);
        }
        if self.bucket.is_none() && self.policy() == AdmissionMode::WriteThrough {
            return AdmissionDecision { pages: requested, refused: None };
        }
        let mut decision = AdmissionDecision { pages: 0, refused: None };
        for page in pages {
            let page = page.low();
            if decision.refused.is_none() {
                decision.refused = self.refuses(page);
            }
            match decision.refused {
                None => {
                    self.ghost.take(page);
                    decision.pages += 1;
                    if let Some(bucket) = &mut self.bucket {
                        bucket.level -= page_bytes as f64;
                    }
                }
                // Remember the page for a second put. With a budget of zero no put is ever
                // admitted, so no page is remembered.
                Some(_) if !self.is_closed() && !self.ghost.knows(page) => {
                    self.ghost.remember(page)
                }
                Some(_) => {}
            }
        }
        decision
    }

    /// Refunds `bytes` that were charged for admitted pages and were not written.
    pub fn give_back(&mut self, bytes: u64) {
        if let Some(bucket) = &mut self.bucket {
            bucket.level = (bucket.level + bytes as f64).min(bucket.size());
        }
    }

    /// The mode that applies now: for `auto`, write-through or second sight.
    #[must_use]
    pub fn policy(&self) -> AdmissionMode {
        match (self.mode, &self.bucket) {
            (AdmissionMode::Auto, Some(bucket))
                if bucket.level <= bucket.size() * WRITE_THROUGH_LEVEL =>
            {
                AdmissionMode::SecondSight
            }
            (AdmissionMode::Auto, _) => AdmissionMode::WriteThrough,
            (mode, _) => mode,
        }
    }

    /// Bytes that may be written immediately, if there is a budget.
    #[must_use]
    pub fn available_bytes(&self) -> Option<u64> {
        self.bucket.as_ref().map(|bucket| bucket.level.max(0.0) as u64)
    }

    /// The write budget.
    #[must_use]
    pub fn budget(&self) -> Option<WriteBudget> {
        self.bucket.as_ref().map(|bucket| bucket.budget)
    }

    /// Pages in the ghost list.
    #[must_use]
    pub fn ghost_pages(&self) -> usize {
        self.ghost.young.len() + self.ghost.old.len()
    }

    fn refuses(&self, page: u64) -> Option<AdmissionRefusal> {
        if self.bucket.as_ref().is_some_and(|bucket| bucket.level <= 0.0) {
            return Some(AdmissionRefusal::Budget);
        }
        let first = self.policy() == AdmissionMode::SecondSight && !self.ghost.knows(page);
        first.then_some(AdmissionRefusal::FirstSight)
    }

    fn is_closed(&self) -> bool {
        self.bucket.as_ref().is_some_and(|bucket| bucket.budget.bytes_per_second == 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn page(number: u64) -> PageHash {
        PageHash((u128::from(number) + 1).to_le_bytes())
    }

    fn pages(numbers: std::ops::Range<u64>) -> impl ExactSizeIterator<Item = PageHash> {
        numbers.map(page).collect::<Vec<_>>().into_iter()
    }

    #[test]
    fn without_budget_every_page_is_admitted() {
        let mut admission = Admission::new(AdmissionMode::Auto, None, 100);
        let all = admission.decide(pages(0..50), 1 << 20, Duration::ZERO);
        assert_eq!(all, AdmissionDecision { pages: 50, refused: None });
        assert_eq!((admission.ghost_pages(), admission.available_bytes()), (0, None));
    }

    #[test]
    fn second_put_admits_known_pages() {
        let mut admission = Admission::new(AdmissionMode::SecondSight, None, 100);
        let first = Some(AdmissionRefusal::FirstSight);
        let mut decide = |range| admission.decide(pages(range), 1, Duration::ZERO);
        assert_eq!(decide(0..4), AdmissionDecision { pages: 0, refused: first });
        assert_eq!(decide(0..6), AdmissionDecision { pages: 4, refused: first });
        assert_eq!(decide(4..6), AdmissionDecision { pages: 2, refused: None });
        // Pages that were admitted and evicted count as new.
        assert_eq!(decide(0..2), AdmissionDecision { pages: 0, refused: first });
    }

    #[test]
    fn pages_after_an_unknown_page_are_refused() {
        let mut admission = Admission::new(AdmissionMode::SecondSight, None, 100);
        admission.decide(pages(5..9), 1, Duration::ZERO);
        assert_eq!(admission.decide(pages(4..9), 1, Duration::ZERO).pages, 0);
        assert_eq!(admission.decide(pages(4..9), 1, Duration::ZERO).pages, 5);
    }

    #[test]
    fn ghost_list_drops_old_pages() {
        let mut admission = Admission::new(AdmissionMode::SecondSight, None, 100);
        for at in 0..1000 {
            admission.decide(pages(at..at + 1), 1, Duration::ZERO);
            assert!(admission.ghost_pages() <= 100);
        }
        assert_eq!(admission.decide(pages(950..951), 1, Duration::ZERO).pages, 1);
        assert_eq!(admission.decide(pages(0..1), 1, Duration::ZERO).pages, 0);
    }

    #[test]
    fn auto_requires_second_sight_on_low_budget() {
        let budget = WriteBudget::per_day(24 * 1000);
        let mut admission = Admission::new(AdmissionMode::Auto, Some(budget), 10_000);
        assert_eq!(admission.available_bytes(), Some(500), "a restart does not fill the bucket");
        assert_eq!(admission.policy(), AdmissionMode::WriteThrough);
        // The bucket holds 1000 bytes: only pages seen twice may use its last quarter.
        let once = admission.decide(pages(100..1100), 1, HOUR);
        assert_eq!(
            once,
            AdmissionDecision { pages: 750, refused: Some(AdmissionRefusal::FirstSight) }
        );
        assert_eq!(admission.policy(), AdmissionMode::SecondSight);
        let twice = admission.decide(pages(850..1200), 1, HOUR);
        assert_eq!(
            twice,
            AdmissionDecision { pages: 250, refused: Some(AdmissionRefusal::Budget) }
        );
        assert_eq!(admission.available_bytes(), Some(0));
        admission.give_back(7);
        assert_eq!(admission.available_bytes(), Some(7));
    }

    #[test]
    fn zero_budget_admits_and_remembers_nothing() {
        for mode in [AdmissionMode::Auto, AdmissionMode::WriteThrough, AdmissionMode::SecondSight] {
            let mut admission = Admission::new(mode, Some(WriteBudget::per_day(0)), 100);
            for hour in 0..3 {
                let none = admission.decide(pages(0..5), 1, HOUR * hour);
                assert_eq!(
                    none,
                    AdmissionDecision { pages: 0, refused: Some(AdmissionRefusal::Budget) }
                );
            }
            assert_eq!(admission.ghost_pages(), 0);
        }
    }

    #[test]
    fn budgets_parse() {
        for (text, per_second) in [
            ("86400B/day", 1.0),
            ("2TB/day", 2e12 / 86_400.0),
            ("7200 B / hour", 2.0),
            ("20MB/s", 20e6),
            ("86.4KB", 1.0),
            ("0B", 0.0),
        ] {
            let read = WriteBudget::parse(text).unwrap().bytes_per_second();
            assert!((read - per_second).abs() <= per_second * 1e-9, "{text}: {read}");
        }
        for text in ["2TB/year", "fast", "/day", "2T/day", ""] {
            let error = WriteBudget::parse(text).unwrap_err();
            assert_eq!(error.kind(), ritornello_format::ErrorKind::Invalid, "{text}");
        }
        assert!(AdmissionMode::parse("often").unwrap_err().to_string().contains("second_sight"));
    }

    #[derive(Clone, Debug)]
    struct Put {
        first: u64,
        pages: u64,
        wait_seconds: u64,
    }

    fn puts() -> impl Strategy<Value = Vec<Put>> {
        let put = (0..300u64, 1..40u64, 0..7200u64).prop_map(|(first, pages, wait_seconds)| Put {
            first,
            pages,
            wait_seconds,
        });
        proptest::collection::vec(put, 1..60)
    }

    proptest! {
        /// Over any span of time, writes are within the budget plus one bucket and one page.
        #[test]
        fn budget_holds_over_every_span(
            puts in puts(),
            mode in prop_oneof![
                Just(AdmissionMode::Auto),
                Just(AdmissionMode::WriteThrough),
                Just(AdmissionMode::SecondSight)
            ],
            per_hour in 0..400u64,
            page_bytes in 1..90u64,
        ) {
            let budget = WriteBudget::per_day(24 * per_hour);
            let mut admission = Admission::new(mode, Some(budget), 64);
            let (mut now, mut written) = (0, Vec::new());
            for put in puts {
                now += put.wait_seconds;
                let range = put.first..put.first + put.pages;
                let decision = admission.decide(pages(range), page_bytes, Duration::from_secs(now));
                prop_assert_eq!(decision.refused.is_none(), decision.pages as u64 == put.pages);
                prop_assert!(admission.ghost_pages() <= 64);
                written.push((now, decision.pages as u64 * page_bytes));
            }
            for from in 0..written.len() {
                let mut sum = 0;
                for &(until, bytes) in &written[from..] {
                    sum += bytes;
                    let passed = (until - written[from].0) as f64;
                    let most = per_hour as f64 * (passed / 3600.0 + 1.0) + page_bytes as f64;
                    prop_assert!(sum as f64 <= most + 1e-6, "{sum} bytes in {passed} s");
                }
            }
        }

        /// Second sight is exact while the ghost list drops no page: a page is admitted if and only
        /// if the page, and all pages before it in the put, were refused since they were last
        /// admitted.
        #[test]
        fn second_sight_is_exact(puts in puts()) {
            let mut admission = Admission::new(AdmissionMode::SecondSight, None, 1 << 16);
            let mut seen = HashSet::new();
            for put in puts {
                let range = put.first..put.first + put.pages;
                let known = range.clone().take_while(|page| seen.contains(page)).count();
                let decision = admission.decide(pages(range.clone()), 1, Duration::ZERO);
                prop_assert_eq!(decision.pages, known);
                for (at, page) in range.enumerate() {
                    if at < known { seen.remove(&page); } else { seen.insert(page); }
                }
            }
        }

        /// A clock that is set back adds no budget.
        #[test]
        fn clock_going_back_adds_no_budget(times in proptest::collection::vec(0..9u64, 1..40)) {
            let budget = WriteBudget::per_day(24 * 100);
            let mut admission = Admission::new(AdmissionMode::WriteThrough, Some(budget), 8);
            let (mut taken, mut latest) = (0, 0);
            for (at, hour) in times.into_iter().enumerate() {
                latest = latest.max(hour);
                let at = at as u64 * 1000;
                let decision = admission.decide(pages(at..at + 1000), 1, HOUR * hour as u32);
                taken += decision.pages as u64;
                prop_assert!(
                    taken <= 100 * (latest + 1),
                    "{taken} bytes were admitted by hour {latest}"
                );
            }
        }
    }
}

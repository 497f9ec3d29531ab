//! The load gate: decides how many of the found pages to load and how many to recompute.
//!
//! Loading takes time in proportion to bytes. Computing a token takes longer the more tokens
//! precede it, because of attention. Within a tier's span, the time saved by loading one more page
//! therefore grows from page to page, so it is best to load either the whole span or nothing of it.
//! The speeds of loading and computing are learned from measured loads and prefills. The estimated
//! speed of a tier rises with the time since its last load, so that a tier that was slow is tried
//! again, and its recovery is noticed.

use crate::Tier;
use ritornello_format::{Error, Result};
use std::time::Duration;

/// Weight of a new observation in the moving averages.
const OBSERVATION_WEIGHT: f64 = 0.2;
/// Assumed bytes per second of a tier before its first measured load: about the rate of an NVMe
/// drive.
const INITIAL_BYTES_PER_SECOND: f64 = 2e9;
/// Weight of [`INITIAL_BYTES_PER_SECOND`] in the average with measured loads, in which a long load
/// has almost weight 1. The weight is low, so that the first long load outweighs the assumption.
const INITIAL_CONFIDENCE: f64 = 0.1;
/// Factor by which a tier's estimated speed rises for each second since its last load, for at most
/// 600 seconds.
const RECOVERY_PER_SECOND: f64 = 1.02;
/// Minimum gain of loading, as a share of the time to compute. A smaller gain is within the error
/// of the estimates: the gate then computes, because after a load it cannot learn that computing
/// would have been faster.
const MIN_GAIN: f64 = 0.05;

/// The decisions that the gate may make.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadMode {
    /// Load the leading pages that save most time, if they save more than 5 % of the time to
    /// compute; otherwise compute.
    #[default]
    Auto,
    /// Load all found pages.
    Always,
    /// Load nothing.
    Never,
}

impl LoadMode {
    /// Parses `auto`, `always` and `never`.
    ///
    /// # Errors
    /// `Invalid`, listing the names.
    pub fn parse(word: &str) -> Result<Self> {
        match word {
            "auto" => Ok(Self::Auto),
            "always" => Ok(Self::Always),
            "never" => Ok(Self::Never),
            _ => Err(Error::invalid("unknown gate: use auto, always or never").with("given", word)),
        }
    }
}

/// Consecutive pages of a prompt on one tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierSpan {
    /// The tier.
    pub tier: Tier,
    /// Number of pages.
    pub pages: usize,
}

/// The input of a decision.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadQuery<'a> {
    /// The pages that a lookup found, starting at the first page that the engine lacks.
    pub found: &'a [TierSpan],
    /// Bytes to load for one page.
    pub page_bytes: u64,
    /// Tokens per page.
    pub page_tokens: u64,
    /// Number of leading tokens whose pages the engine already holds.
    pub before: u64,
    /// Number of tokens of the prompt.
    pub tokens: u64,
    /// Bytes already waiting to be loaded from each of [`Tier::ALL`].
    pub queued: [u64; 4],
    /// The allowed decisions.
    pub mode: LoadMode,
}

/// The output of a decision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadDecision {
    /// Number of leading found pages to load.
    pub pages: usize,
    /// Estimated time to load [`pages`](Self::pages). Before the first prefill was recorded, all
    /// times of the decision are zero.
    pub load: Duration,
    /// Estimated time to compute the tokens after the loaded pages.
    pub compute: Duration,
    /// Estimated time to compute all tokens after the first [`LoadQuery::before`], if nothing is
    /// loaded.
    pub recompute: Duration,
    /// Estimated time to load pages and to compute the tokens after them: [`pages`](Self::pages),
    /// or the pages that take the least time if the decision is to load nothing. Zero if no page
    /// was found, or if no prefill was recorded.
    pub with_load: Duration,
}

/// Estimates prefill seconds as a cost per token plus a cost per pair of a token and a token before
/// it. The costs are a least-squares fit over exponentially weighted observations.
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillModel {
    // Moving averages of products of two numbers out of tokens (t), pairs (p) and seconds (s). Each
    // of the three is divided by the tokens of its prefill before the multiplication.
    tt: f64,
    tp: f64,
    pp: f64,
    ts: f64,
    ps: f64,
}

impl PrefillModel {
    fn pairs(before: f64, tokens: f64) -> f64 {
        tokens * before + tokens * tokens / 2.0
    }

    /// Records that computing `tokens` tokens after `before` earlier tokens took `took`.
    pub fn record(&mut self, before: u64, tokens: u64, took: Duration) {
        if tokens == 0 {
            return;
        }
        let (before, tokens, seconds) = (before as f64, tokens as f64, took.as_secs_f64());
        let pairs = Self::pairs(before, tokens);
        // Divide tokens, pairs and seconds by the number of tokens, so that a long prefill does not
        // outweigh a short prefill.
        let (t, p, s) = (1.0, pairs / tokens, seconds / tokens);
        let blend = |sum: &mut f64, value: f64| *sum += OBSERVATION_WEIGHT * (value - *sum);
        blend(&mut self.tt, t * t);
        blend(&mut self.tp, t * p);
        blend(&mut self.pp, p * p);
        blend(&mut self.ts, t * s);
        blend(&mut self.ps, p * s);
    }

    /// Estimated time to compute `tokens` tokens after `before` earlier tokens; `None` before the
    /// first observation.
    #[must_use]
    pub fn estimate(&self, before: u64, tokens: u64) -> Option<Duration> {
        let seconds = self.seconds(before as f64, tokens as f64)?;
        Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }

    /// Seconds to compute `tokens` tokens after `before` earlier tokens; `None` before the first
    /// observation.
    fn seconds(&self, before: f64, tokens: f64) -> Option<f64> {
        if self.tt == 0.0 {
            return None;
        }
        let mean = self.ts / self.tt;
        let spread = self.tt * self.pp - self.tp * self.tp;
        // The two costs can be separated only if the observed prefills differ in the mean number of
        // tokens before a token.
        let (per_token, per_pair) = if spread > 1e-3 * self.tt * self.pp {
            let per_pair = (self.tt * self.ps - self.tp * self.ts) / spread;
            let per_pair = per_pair.clamp(0.0, self.ts / self.tp.max(f64::MIN_POSITIVE));
            (((self.ts - per_pair * self.tp) / self.tt).max(0.0), per_pair)
        } else {
            (mean, 0.0)
        };
        Some(per_token * tokens + per_pair * Self::pairs(before, tokens))
    }
}

#[derive(Clone, Copy, Debug)]
struct TierSpeed {
    /// Estimated bytes per second once the first byte of a load has arrived.
    rate: f64,
    /// Estimated seconds from a request to its first byte.
    latency: f64,
    /// Configured limit in bytes per second.
    cap: f64,
    /// Sum of [`INITIAL_CONFIDENCE`] and of the weights of past loads; a weight is almost 1 for a
    /// long load, less for a short load. A load's share in the average is its weight over this sum,
    /// its own weight included, so the first loads have larger shares. The share is at least
    /// `OBSERVATION_WEIGHT` times the weight.
    confidence: f64,
    /// Time of the last observation, in seconds of the caller's clock.
    observed_at: f64,
}

impl TierSpeed {
    fn seconds(&self, bytes: f64, queued: f64, now: f64) -> f64 {
        let faster = RECOVERY_PER_SECOND.powf((now - self.observed_at).clamp(0.0, 600.0));
        let all = bytes + queued;
        ((self.latency + all / self.rate) / faster).max(all / self.cap)
    }
}

/// Decides how many pages to load, from measured loads and prefills. Times are seconds of a
/// monotonic clock.
#[derive(Clone, Debug)]
pub struct Gate {
    prefill: PrefillModel,
    tiers: [TierSpeed; 4],
}

impl Default for Gate {
    fn default() -> Self {
        let (rate, cap, confidence) = (INITIAL_BYTES_PER_SECOND, f64::INFINITY, INITIAL_CONFIDENCE);
        let speed = TierSpeed { rate, latency: 0.0, cap, confidence, observed_at: 0.0 };
        Self { prefill: PrefillModel::default(), tiers: [speed; 4] }
    }
}

impl Gate {
    /// Limits the estimated speed of a tier to `bytes_per_second`.
    pub fn set_cap(&mut self, tier: Tier, bytes_per_second: u64) {
        self.tiers[tier as usize].cap = bytes_per_second.max(1) as f64;
    }

    /// Records that loading `bytes` bytes from `tier` took `took`, from request to completion.
    pub fn record_load(&mut self, tier: Tier, bytes: u64, took: Duration, now: f64) {
        let speed = &mut self.tiers[tier as usize];
        let (bytes, took) = (bytes as f64, took.as_secs_f64().max(1e-6));
        // A small load mostly measures the latency, a large load the rate: the more bytes a load
        // has, the more it corrects the rate, and the less the latency.
        let share = bytes / (bytes + speed.rate * 0.01);
        // The average is over seconds per byte, not bytes per second, because the gate estimates
        // times.
        let each = (took - speed.latency).max(took / 2.0) / bytes.max(1.0);
        let gain = (share / (speed.confidence + share)).max(OBSERVATION_WEIGHT * share);
        speed.confidence += share;
        let known = 1.0 / speed.rate;
        speed.rate = 1.0 / (known + gain * (each - known));
        let latency = (took - bytes / speed.rate).max(0.0);
        speed.latency += OBSERVATION_WEIGHT * (1.0 - share) * (latency - speed.latency);
        speed.observed_at = now;
    }

    /// Records that computing `tokens` tokens after `before` earlier tokens took `took`.
    pub fn record_prefill(&mut self, before: u64, tokens: u64, took: Duration) {
        self.prefill.record(before, tokens, took);
    }

    /// Estimated time to compute `tokens` tokens after `before` earlier tokens; `None` before the
    /// first prefill was recorded.
    #[must_use]
    pub fn prefill_time(&self, before: u64, tokens: u64) -> Option<Duration> {
        self.prefill.estimate(before, tokens)
    }

    /// Decides how many of the found pages to load. Before the first prefill was recorded: all of
    /// them, unless the mode is [`LoadMode::Never`].
    #[must_use]
    pub fn decide(&self, query: &LoadQuery<'_>, now: f64) -> LoadDecision {
        let (bytes, tokens) = (query.page_bytes as f64, query.page_tokens as f64);
        let (before, all) = (query.before as f64, query.tokens as f64);
        let rest = |pages: usize| {
            let from = (before + pages as f64 * tokens).min(all);
            self.prefill.seconds(from, all - from)
        };
        let found = match query.mode {
            LoadMode::Never => 0,
            _ => query.found.iter().map(|span| span.pages).sum(),
        };
        let Some(recompute) = rest(0) else {
            let none = Duration::ZERO;
            return LoadDecision {
                pages: found,
                load: none,
                compute: none,
                recompute: none,
                with_load: none,
            };
        };
        let mut best = (0, 0.0, recompute);
        let mut least = f64::INFINITY;
        let mut loads = [0.0_f64; 4];
        let mut pages = 0;
        for span in query.found {
            let tier = span.tier as usize;
            pages += span.pages;
            loads[tier] += span.pages as f64 * bytes;
            // The estimate assumes that tiers are read in parallel: the slowest read determines the
            // time.
            let load = (0..4)
                .filter(|&tier| loads[tier] > 0.0)
                .map(|tier| self.tiers[tier].seconds(loads[tier], query.queued[tier] as f64, now))
                .fold(0.0, f64::max);
            let compute = rest(pages).unwrap_or(0.0);
            least = least.min(load + compute);
            let worth_it = match query.mode {
                LoadMode::Auto => {
                    load + compute < (recompute * (1.0 - MIN_GAIN)).min(best.1 + best.2)
                }
                LoadMode::Always => true,
                LoadMode::Never => false,
            };
            if worth_it {
                best = (pages, load, compute);
            }
        }
        let duration = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        let with_load = match best.0 {
            0 if least.is_infinite() => 0.0,
            0 => least,
            _ => best.1 + best.2,
        };
        LoadDecision {
            pages: best.0,
            load: duration(best.1),
            compute: duration(best.2),
            recompute: duration(recompute),
            with_load: duration(with_load),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn query(found: &[TierSpan], tokens: u64) -> LoadQuery<'_> {
        LoadQuery {
            found,
            page_bytes: MIB,
            page_tokens: 64,
            before: 0,
            tokens,
            queued: [0; 4],
            mode: LoadMode::Auto,
        }
    }

    fn disk(pages: usize) -> [TierSpan; 1] {
        [TierSpan { tier: Tier::Disk, pages }]
    }

    /// A gate that has measured prefills of 10,000 tokens per second, and loads from disk at `rate`
    /// bytes per second.
    fn gate(rate: f64) -> Gate {
        let mut gate = Gate::default();
        for _ in 0..40 {
            gate.record_prefill(0, 2_000, Duration::from_millis(200));
            let took = Duration::from_secs_f64(64e6 / rate);
            gate.record_load(Tier::Disk, 64_000_000, took, 0.0);
        }
        gate
    }

    #[test]
    fn gate_loads_all_without_measurements() {
        assert_eq!(Gate::default().decide(&query(&disk(9), 1_000), 0.0).pages, 9);
    }

    #[test]
    fn gate_loads_above_break_even_only() {
        // A page has 64 tokens and 1 MiB, and takes 6.4 ms to compute, so loading breaks even at
        // 164 MB/s.
        for (rate, pages) in [(1.5e9, 30), (300e6, 30), (120e6, 0), (20e6, 0)] {
            let decided = gate(rate).decide(&query(&disk(30), 2_000), 0.0);
            assert_eq!(decided.pages, pages, "{rate}: {decided:?}");
            let total = decided.load + decided.compute;
            assert!(total <= decided.recompute);
            // A load that the gate declines would save at most the share `MIN_GAIN` of the time to
            // compute.
            assert_eq!(decided.with_load > decided.recompute.mul_f64(1.0 - MIN_GAIN), pages == 0);
        }
    }

    #[test]
    fn fixed_modes_still_estimate_times() {
        let (slow, found) = (gate(20e6), disk(30));
        let decided = |mode| slow.decide(&LoadQuery { mode, ..query(&found, 2_000) }, 0.0);
        let (always, never) = (decided(LoadMode::Always), decided(LoadMode::Never));
        assert_eq!((always.pages, never.pages), (30, 0));
        assert!(always.load + always.compute > always.recompute);
        assert_eq!((never.load, never.compute), (Duration::ZERO, never.recompute));
        assert_eq!(never.with_load, always.with_load);
        assert_eq!(slow.decide(&query(&[], 2_000), 0.0).with_load, Duration::ZERO);
        let nothing = LoadQuery { mode: LoadMode::Never, ..query(&found, 2_000) };
        assert_eq!(Gate::default().decide(&nothing, 0.0).pages, 0);
        assert!(LoadMode::parse("often").unwrap_err().to_string().contains("always"));
    }

    #[test]
    fn first_long_load_reveals_slow_tier() {
        let mut gate = Gate::default();
        gate.record_prefill(0, 2_000, Duration::from_millis(200));
        gate.record_load(Tier::Disk, 4 << 10, Duration::from_millis(1), 0.0);
        assert_eq!(gate.decide(&query(&disk(30), 2_000), 0.0).pages, 30);
        gate.record_load(Tier::Disk, 16 * MIB, Duration::from_secs(1), 0.0);
        assert_eq!(gate.decide(&query(&disk(30), 2_000), 0.0).pages, 0);
    }

    #[test]
    fn rate_cap_applies_without_loads_and_after_recovery() {
        let mut gate = Gate::default();
        gate.record_prefill(0, 2_000, Duration::from_millis(200));
        gate.set_cap(Tier::Disk, 100_000_000);
        assert_eq!(gate.decide(&query(&disk(30), 2_000), 600.0).pages, 0);
        gate.set_cap(Tier::Disk, 1_000_000_000);
        assert_eq!(gate.decide(&query(&disk(30), 2_000), 600.0).pages, 30);
    }

    #[test]
    fn queued_bytes_count_against_loading() {
        let gate = gate(300e6);
        let found = disk(30);
        let mut busy = query(&found, 2_000);
        busy.queued[Tier::Disk as usize] = 600 * MIB;
        assert_eq!(gate.decide(&busy, 0.0).pages, 0);
    }

    #[test]
    fn slow_tier_below_fast_tier_is_skipped() {
        let mut gate = gate(1.5e9);
        for _ in 0..40 {
            gate.record_load(Tier::Remote, 64_000_000, Duration::from_secs(4), 0.0);
        }
        let found = [disk(10)[0], TierSpan { tier: Tier::Remote, pages: 20 }];
        assert_eq!(gate.decide(&query(&found, 2_000), 0.0).pages, 10);
    }

    #[test]
    fn slow_tier_is_retried_later() {
        let gate = gate(100e6);
        assert_eq!(gate.decide(&query(&disk(30), 2_000), 1.0).pages, 0);
        assert_eq!(gate.decide(&query(&disk(30), 2_000), 120.0).pages, 30);
    }

    #[test]
    fn estimate_depends_on_the_position_in_the_prompt() {
        let mut model = PrefillModel::default();
        assert_eq!(model.estimate(0, 100), None);
        model.record(0, 0, Duration::from_secs(1));
        assert_eq!(model.estimate(0, 0), None);
        for _ in 0..40 {
            for (before, millis) in [(0, 100), (9_000, 190)] {
                model.record(before, 1_000, Duration::from_millis(millis));
            }
        }
        let millis = |before| model.estimate(before, 1_000).unwrap().as_secs_f64() * 1e3;
        assert!((millis(0) - 100.0).abs() < 1.0, "{}", millis(0));
        assert!((millis(4_500) - 145.0).abs() < 1.0, "{}", millis(4_500));
        assert_eq!(model.estimate(500, 0), Some(Duration::ZERO));
    }

    #[test]
    fn long_prompts_gain_more_than_short_ones() {
        let mut gate = Gate::default();
        for _ in 0..40 {
            // The recorded prefills cost 20 us per token, and 10 ns per pair of a token and a token
            // before it.
            for (before, tokens) in [(0, 500), (8_000, 500), (0, 4_000), (30_000, 1_000)] {
                let pairs = PrefillModel::pairs(before as f64, tokens as f64);
                let seconds = 20e-6 * tokens as f64 + 10e-9 * pairs;
                gate.record_prefill(before, tokens, Duration::from_secs_f64(seconds));
            }
            gate.record_load(Tier::Disk, 64_000_000, Duration::from_millis(160), 0.0);
        }
        // A page takes 2.6 ms to load. Computing it takes 1.3 ms at the start of a prompt, and 22
        // ms after 32,000 tokens.
        assert_eq!(gate.decide(&query(&disk(8), 540), 0.0).pages, 0);
        let long = gate.decide(&query(&disk(500), 32_100), 0.0);
        assert_eq!(long.pages, 500);
        assert!(long.load > long.compute);
    }
}

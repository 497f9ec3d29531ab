//! A workload of ten stages, in which different shares of the tokens repeat beginnings of earlier
//! prompts.

use super::check;
use super::random::Random;
use crate::{Trace, TraceBuilder};
use ritornello_format::Result;
use std::ops::Range;

/// For each stage, the expected share of its tokens that an unbounded store hits.
pub const EXPECTED_HIT_RATES: [f64; 10] = [0.2, 0.3, 0.5, 0.7, 0.5, 0.3, 0.1, 0.3, 0.5, 0.7];

/// A warm-up of new prompts, then ten stages of prompts that begin like earlier prompts.
///
/// All prompts have the same length of `n` blocks. In a stage with expected hit rate `h` a prompt
/// begins with the first `k` blocks of an earlier prompt and continues with new blocks. `k / n` is
/// drawn uniformly from the widest interval between 0 and 1 whose mean is `h`. A fraction of a
/// block is rounded up with a probability equal to the fraction, which preserves the mean. An
/// unbounded store thus hits `k` blocks of the prompt, and on average a share `h` of the stage's
/// blocks. The generator chooses, among `m` earlier prompts, numbered from the oldest, the prompt
/// with the number `m * u^(1 / (1 - skew))`, rounded down, for a uniform `u`. The probability of
/// number `i` is thus about proportional to `i^-skew`; without skew all prompts are equally likely.
#[derive(Clone, Debug, PartialEq)]
pub struct TenStage {
    /// Tokens of new prompts before the first stage.
    pub warm_up_tokens: u64,
    /// Tokens per stage.
    pub stage_tokens: u64,
    /// Tokens per prompt.
    pub prompt_tokens: u64,
    /// How strongly the oldest prompts are preferred: from 0 (not at all) to below 1.
    pub skew: f64,
    /// Tokens per block.
    pub block_tokens: u64,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for TenStage {
    fn default() -> Self {
        Self {
            warm_up_tokens: 100_000_000,
            stage_tokens: 20_000_000,
            prompt_tokens: 8192,
            skew: 0.6,
            block_tokens: 64,
            seed: 0,
        }
    }
}

impl TenStage {
    /// Generates the trace.
    ///
    /// # Errors
    /// `Invalid` with the option's name if an option is out of range.
    pub fn generate(&self) -> Result<Trace> {
        check(self.block_tokens > 0, "block_tokens", "a block has at least one token")?;
        let blocks = self.prompt_tokens / self.block_tokens;
        let fits = (1..1 << 20).contains(&blocks);
        check(fits, "prompt_tokens", "a prompt must have 1 to 1,048,575 blocks")?;
        check((0.0..1.0).contains(&self.skew), "skew", "skew is at least 0 and below 1")?;
        check(
            self.warm_up_tokens >= self.prompt_tokens,
            "warm_up_tokens",
            "the warm-up is at least as long as a prompt",
        )?;
        check(
            self.stage_tokens >= self.prompt_tokens,
            "stage_tokens",
            "a stage is at least as long as a prompt",
        )?;
        let mut random = Random::new(self.seed);
        let mut builder = TraceBuilder::new("ten-stage");
        let mut prompts: Vec<Vec<u64>> = Vec::new();
        let mut next_id = 0u64;
        let stages = self.stages();
        for number in 0..stages[9].end {
            let stage = stages.iter().position(|stage| stage.contains(&number));
            let mut prompt = Vec::with_capacity(blocks as usize);
            if let Some(stage) = stage {
                let share = spread(EXPECTED_HIT_RATES[stage], random.unit());
                let known = (share * blocks as f64 + random.unit()) as usize;
                let rank = random.unit().powf(1.0 / (1.0 - self.skew));
                let earlier = &prompts[(rank * prompts.len() as f64) as usize];
                prompt.extend_from_slice(&earlier[..known.min(earlier.len())]);
            }
            while (prompt.len() as u64) < blocks {
                prompt.push(next_id);
                next_id += 1;
            }
            // Requests come one second apart. No result depends on their times.
            builder.request(number as f64 * 1000.0, prompt.iter().copied());
            prompts.push(prompt);
        }
        Ok(builder.finish())
    }

    /// The range of requests of each stage.
    #[must_use]
    pub fn stages(&self) -> [Range<usize>; 10] {
        let prompts = |tokens: u64| (tokens / self.prompt_tokens.max(1)) as usize;
        let (first, each) = (prompts(self.warm_up_tokens), prompts(self.stage_tokens));
        std::array::from_fn(|stage| first + stage * each..first + (stage + 1) * each)
    }
}

/// Maps `unit`, a uniform number from 0 to 1, to a share between 0 and 1 with mean `mean`.
fn spread(mean: f64, unit: f64) -> f64 {
    let reach = mean.min(1.0 - mean);
    mean - reach + 2.0 * reach * unit
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn small(seed: u64) -> TenStage {
        TenStage {
            warm_up_tokens: 1_000_000,
            stage_tokens: 4_000_000,
            prompt_tokens: 2048,
            seed,
            ..TenStage::default()
        }
    }

    #[test]
    fn unbounded_store_hits_expected_rates() {
        for seed in 0..3 {
            let trace = small(seed).generate().unwrap();
            let mut seen = HashSet::new();
            let mut hits_of = |requests: Range<usize>| {
                let (mut hits, mut references) = (0, 0);
                for at in requests {
                    let blocks = trace.request(at);
                    hits += blocks.iter().take_while(|block| seen.contains(*block)).count();
                    references += blocks.len();
                    seen.extend(blocks.iter().copied());
                }
                hits as f64 / references as f64
            };
            let stages = small(seed).stages();
            assert_eq!(hits_of(0..stages[0].start), 0.0);
            for (stage, expected) in stages.into_iter().zip(EXPECTED_HIT_RATES) {
                let hit = hits_of(stage.clone());
                assert!((hit - expected).abs() < 0.02, "{stage:?}: {hit} for {expected}");
            }
        }
    }

    #[test]
    fn seeds_reproduce_and_warm_up_has_its_length() {
        let footprint = |seed| small(seed).generate().unwrap().footprint();
        assert_eq!(footprint(1), footprint(1));
        assert_ne!(footprint(1), footprint(2));
        let usual = TenStage::default();
        let tokens = usual.stages()[0].start as u64 * usual.prompt_tokens;
        assert!((99_990_000..=100_000_000).contains(&tokens), "{tokens}");
    }

    #[test]
    fn unusable_options_are_refused() {
        let good = small(0);
        for bad in [
            TenStage { skew: 1.0, ..good.clone() },
            TenStage { skew: f64::NAN, ..good.clone() },
            TenStage { block_tokens: 0, ..good.clone() },
            TenStage { prompt_tokens: 10, ..good.clone() },
            TenStage { stage_tokens: 0, ..good.clone() },
            TenStage { warm_up_tokens: 0, ..good },
        ] {
            assert!(bad.generate().is_err(), "{bad:?}");
        }
    }
}

//! A workload of many users. Each user asks several rounds of questions about a long history.

use super::check;
use super::random::Random;
use crate::{Trace, TraceBuilder};
use ritornello_format::Result;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Multi-round question answering, with the arithmetic of LMCache's benchmark of the same name
/// (`benchmarks/multi_round_qa/multi-round-qa.py` in LMCache/LMCache).
///
/// A prompt consists of the shared system prompt, the user's own history, the questions and answers
/// of earlier rounds, and a new question. A user asks the next question `users / qps` seconds after
/// the previous question, and leaves after `rounds` questions. A session thus lasts `(rounds - 1) *
/// users / qps` seconds, and a new user joins every `(rounds - 1) / qps` seconds, so that there are
/// about `users` concurrent users. The trace starts with users in the middle of their sessions:
/// these users have fewer rounds left, and their prompts lack the questions and answers from before
/// the trace. Each answer is complete before its user's next question.
///
/// The benchmark has equal pauses. This generator multiplies each pause by a number drawn uniformly
/// from `1 - jitter` to `1 + jitter`; without jitter it generates the benchmark's requests. A
/// partial block at the end of a prompt is left out.
#[derive(Clone, Debug, PartialEq)]
pub struct MultiRoundQa {
    /// Concurrent users.
    pub users: u32,
    /// Questions per user.
    pub rounds: u32,
    /// Questions per second of all users together.
    pub qps: f64,
    /// Tokens of the shared system prompt.
    pub system_tokens: u64,
    /// Tokens of a user's own history.
    pub history_tokens: u64,
    /// Tokens per question.
    pub question_tokens: u64,
    /// Tokens per answer.
    pub answer_tokens: u64,
    /// Maximum change of a pause, as a share of the pause: from 0 to 1.
    pub jitter: f64,
    /// Requests to generate.
    pub requests: u64,
    /// Tokens per block.
    pub block_tokens: u64,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for MultiRoundQa {
    fn default() -> Self {
        Self {
            users: 100,
            rounds: 20,
            qps: 2.0,
            system_tokens: 1000,
            history_tokens: 10_000,
            question_tokens: 20,
            answer_tokens: 100,
            jitter: 0.5,
            // With this number of requests, the concurrent users use a little more than 10 % of the
            // trace's distinct blocks at any time.
            requests: 14_000,
            block_tokens: 64,
            seed: 0,
        }
    }
}

/// A user between two questions.
struct User {
    /// Number of the user, starting at 1.
    number: u64,
    /// Questions asked, including assumed questions before the trace begins.
    asked: u32,
    /// Earlier rounds whose questions and answers are in the prompt.
    in_prompt: u32,
}

impl MultiRoundQa {
    /// Generates the trace.
    ///
    /// # Errors
    /// `Invalid` with the option's name if an option is out of range.
    pub fn generate(&self) -> Result<Trace> {
        check(self.users > 0, "users", "at least one user is needed")?;
        check(self.rounds > 1, "rounds", "a user has at least two rounds")?;
        check(
            self.qps > 0.0 && self.qps.is_finite(),
            "qps",
            "the rate in questions per second must be above zero",
        )?;
        check((0.0..=1.0).contains(&self.jitter), "jitter", "jitter is between 0 and 1")?;
        check(self.requests > 0, "requests", "at least one request is needed")?;
        check(self.block_tokens > 0, "block_tokens", "a block has at least one token")?;
        let longest = [self.question_tokens, self.answer_tokens, 1]
            .iter()
            .try_fold(0u64, |sum, part| sum.checked_add(*part))
            .and_then(|round| round.checked_mul(u64::from(self.rounds)))
            .and_then(|rounds| rounds.checked_add(self.system_tokens))
            .and_then(|tokens| tokens.checked_add(self.history_tokens));
        let blocks = longest.map(|tokens| tokens / self.block_tokens);
        let fits = blocks.is_some_and(|blocks| (1..1 << 20).contains(&blocks));
        check(fits, "history_tokens", "a prompt must have 1 to 1,048,575 blocks")?;
        let mut random = Random::new(self.seed);
        let mut builder = TraceBuilder::new(format!("multi-round-qa-{}", self.history_tokens));
        let pause = f64::from(self.users) / self.qps;
        let join = pause * f64::from(self.rounds - 1) / f64::from(self.users);
        // The users are ordered by the time of their next question, then by number. Times are not
        // negative, so their bits sort like the times.
        let mut waiting = BinaryHeap::new();
        let mut users = Vec::new();
        for number in 0..self.users {
            let since = f64::from(self.users - number) * join;
            let asked = (since / pause) as u32 + 1;
            if asked < self.rounds {
                let time = (f64::from(asked) * pause - since).max(0.0);
                waiting.push(Reverse((time.to_bits(), users.len())));
                users.push(User { number: u64::from(number) + 1, asked, in_prompt: 0 });
            }
        }
        let mut next_user = u64::from(self.users) + 1;
        let mut next_join = 0.0;
        for _ in 0..self.requests {
            while waiting.peek().is_none_or(|Reverse((bits, _))| f64::from_bits(*bits) >= next_join)
            {
                waiting.push(Reverse((f64::to_bits(next_join), users.len())));
                users.push(User { number: next_user, asked: 0, in_prompt: 0 });
                next_user += 1;
                next_join += join;
            }
            let Some(Reverse((bits, at))) = waiting.pop() else { break };
            let time = f64::from_bits(bits);
            let user = &mut users[at];
            builder.request(time * 1000.0, self.prompt(user));
            user.asked += 1;
            user.in_prompt += 1;
            if user.asked < self.rounds {
                let spread = 1.0 + self.jitter * (2.0 * random.unit() - 1.0);
                waiting.push(Reverse(((time + pause * spread).to_bits(), at)));
            }
        }
        Ok(builder.finish())
    }

    /// The full blocks of a user's next prompt. Blocks within the system prompt are shared.
    fn prompt(&self, user: &User) -> impl Iterator<Item = u64> + use<> {
        let in_prompt = u64::from(user.in_prompt);
        let tokens = self.system_tokens
            + self.history_tokens
            + (in_prompt + 1) * self.question_tokens
            + in_prompt * self.answer_tokens;
        let shared = self.system_tokens / self.block_tokens;
        let own = user.number << 20;
        (0..tokens / self.block_tokens).map(move |at| if at < shared { at } else { own | at })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Sizes, replay};
    use ritornello_store::eviction::PolicyKind;

    fn unbounded(trace: &Trace) -> f64 {
        let sizes =
            Sizes { capacity_blocks: trace.footprint() as u64, block_bytes: 1 << 20, warm_up: 0.5 };
        replay(trace, PolicyKind::Lru.build().as_mut(), &sizes, &mut |_| ()).unwrap().hit_rate()
    }

    #[test]
    fn unbounded_hit_rates_match_the_formula() {
        for history_tokens in [1_000, 10_000, 20_000] {
            let workload =
                MultiRoundQa { history_tokens, requests: 20_000, ..MultiRoundQa::default() };
            let trace = workload.generate().unwrap();
            assert_eq!(trace.requests(), 20_000);
            // All blocks of a prompt are hits, except the new blocks. The new blocks hold the
            // history and the question in the first round, and the last answer and the question in
            // later rounds.
            let (mut hit, mut references) = (0.0, 0.0);
            for round in 0..20 {
                let blocks = (1000 + history_tokens + round * 120 + 20) / 64;
                references += blocks as f64;
                hit += if round == 0 {
                    15.0
                } else {
                    ((900 + history_tokens + round * 120) / 64) as f64
                };
            }
            assert!((unbounded(&trace) - hit / references).abs() < 0.005, "{history_tokens}");
        }
    }

    #[test]
    fn concurrency_and_order_are_as_configured() {
        let workload = MultiRoundQa { users: 50, rounds: 10, jitter: 0.0, ..Default::default() };
        let trace = MultiRoundQa { requests: 9000, ..workload }.generate().unwrap();
        assert_eq!(trace.clock_jumps(), 0);
        // 50 users are present at a time, with 10 questions each, so 9,000 questions come from
        // about 900 users.
        let own = |at: usize| trace.request(at)[20];
        let mut users: Vec<u32> = (0..9000).map(own).collect();
        let mut window = users[5000..5050].to_vec();
        users.sort_unstable();
        users.dedup();
        assert!((900..=960).contains(&users.len()), "{}", users.len());
        window.sort_unstable();
        window.dedup();
        assert!((45..=50).contains(&window.len()), "{}", window.len());
    }

    #[test]
    fn seeds_reproduce_traces() {
        let seeded = |seed| {
            let trace = MultiRoundQa { seed, requests: 500, ..MultiRoundQa::default() };
            let trace = trace.generate().unwrap();
            (0..500).map(|at| trace.request(at)[40]).collect::<Vec<u32>>()
        };
        assert_eq!(seeded(1), seeded(1));
        assert_ne!(seeded(1), seeded(2));
    }

    #[test]
    fn unusable_options_are_refused() {
        let good = MultiRoundQa::default();
        for bad in [
            MultiRoundQa { users: 0, ..good.clone() },
            MultiRoundQa { rounds: 1, ..good.clone() },
            MultiRoundQa { qps: 0.0, ..good.clone() },
            MultiRoundQa { qps: f64::NAN, ..good.clone() },
            MultiRoundQa { jitter: 1.5, ..good.clone() },
            MultiRoundQa { requests: 0, ..good.clone() },
            MultiRoundQa { block_tokens: 0, ..good.clone() },
            MultiRoundQa { history_tokens: u64::MAX, ..good.clone() },
            MultiRoundQa { block_tokens: 1 << 40, ..good },
        ] {
            assert!(bad.generate().is_err(), "{bad:?}");
        }
    }
}

//! Arguments of `ritornello simulate`.

use super::pipeline::PipelineArgs;
use super::shares::{capacity, share};
use clap::{Args, Subcommand, ValueEnum};
use ritornello_format::parse_bytes;
use ritornello_sim::{SimPolicy, TracePart};
use ritornello_terminal::value::picture;
use std::path::PathBuf;

/// Arguments of `simulate`.
#[derive(Debug, Args)]
#[command(
    after_help = "\
A trace has one JSON object per line, gzip or plain: timestamp (ms), input_length, output_length
(tokens), hash_ids (a number for each block of the prompt). Requests are replayed in the order of the
lines; a timestamp below the previous one is reported, and changes nothing. A block is identified by
its id and all ids before it. A hit is a block that is stored with all blocks before it.

Each policy is the store's own code, called as the store calls it, except belady, which knows all
future requests and gives an upper bound of the hit rate. Capacities are shares of the footprint: the
trace's distinct blocks. Hits during the warm-up are not counted, writes are.

--generate multi-round-qa: users, each with a history, ask in rounds, as in LMCache's benchmark.
--generate ten-stage: after 100 M new tokens, stages with expected hit rates of 0.2 0.3 0.5 0.7 0.5
0.3 0.1 0.3 0.5 0.7 in a store that evicts nothing.

Examples:
  ritornello simulate traces/mooncake_conversation.jsonl.gz
  ritornello simulate TRACE --capacity 5%,10% --policy lru,belady --warm-up 0% --chart rates.svg
  ritornello simulate TRACE --half second --json | jq '.rows[] | [.policy, .hit_rate]'
  ritornello simulate --generate multi-round-qa --history-tokens 20000 --seed 7
  ritornello simulate --generate ten-stage --stage-tokens 5000000
  ritornello simulate pipeline --disk-gbs 6.5 --link-gbs 24 --tflops 120",
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub struct SimulateArgs {
    /// A model instead of a trace.
    #[command(subcommand)]
    pub model: Option<Model>,
    /// Traces to replay
    #[arg(value_name = "TRACE", required_unless_present = "generate")]
    pub traces: Vec<PathBuf>,
    /// Capacities as shares of the footprint, above 0% and at most 100%: 5% or 0.05
    #[arg(long, value_delimiter = ',', default_value = "1%,5%,10%,30%", value_parser = capacity)]
    pub capacity: Vec<f64>,
    /// Eviction policies
    #[arg(long, value_delimiter = ',', default_value = "adaptive,lru,arc,2q,s3fifo,belady",
          value_parser = policy)]
    pub policy: Vec<SimPolicy>,
    /// Share of the trace's requests, from its beginning, whose hits are not counted: below 100%
    #[arg(long, default_value = "20%", value_parser = share)]
    pub warm_up: f64,
    /// The requests to replay: all, or one half as a separate trace
    #[arg(long, value_enum, default_value = "whole")]
    pub half: HalfName,
    /// Skip broken lines and report them, instead of stopping at the first broken line
    #[arg(long)]
    pub skip_broken: bool,
    /// Write a chart of hit rate over capacity: an SVG file
    #[arg(long, value_name = "FILE", value_parser = picture)]
    pub chart: Option<PathBuf>,
    /// Tokens per block, 1 to 1048576 [default: 512 in traces, 64 in generated workloads]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub block_tokens: Option<u64>,
    /// Bytes of a token's keys and values, at most 1GiB: the default is Llama-3-8B in bfloat16
    #[arg(long, default_value = "128KiB", value_parser = size)]
    pub token_bytes: u64,
    /// Replay workloads generated from the parameters below
    #[arg(long, value_delimiter = ',', value_enum)]
    pub generate: Vec<Workload>,
    /// Seed of generated workloads
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Parameters of the workload `multi-round-qa`.
    #[command(flatten)]
    pub multi_round_qa: MultiRoundQaArgs,
    /// Parameters of the workload `ten-stage`.
    #[command(flatten)]
    pub ten_stage: TenStageArgs,
}

/// Models by name.
#[derive(Debug, Subcommand)]
pub enum Model {
    /// Model prefill after a loaded prefix: TTFT, bubble, crossover hit rate, cost
    Pipeline(Box<PipelineArgs>),
}

/// Arguments of `--generate multi-round-qa`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Generated: multi-round-qa")]
pub struct MultiRoundQaArgs {
    /// Concurrent users [default: 100]
    #[arg(long)]
    pub users: Option<u32>,
    /// Questions per user [default: 20]
    #[arg(long)]
    pub rounds: Option<u32>,
    /// Questions per second, of all users together [default: 2]
    #[arg(long)]
    pub qps: Option<f64>,
    /// Tokens of the prompt that all users share [default: 1000]
    #[arg(long)]
    pub system_tokens: Option<u64>,
    /// Tokens of a user's own history [default: 10000]
    #[arg(long)]
    pub history_tokens: Option<u64>,
    /// Tokens of a question [default: 20]
    #[arg(long)]
    pub question_tokens: Option<u64>,
    /// Tokens of an answer [default: 100]
    #[arg(long)]
    pub answer_tokens: Option<u64>,
    /// Multiply each pause between two questions of a user by a random factor, uniform from
    /// 1 - JITTER to 1 + JITTER; from 0 (equal pauses, as in LMCache) to 1 [default: 0.5]
    #[arg(long)]
    pub jitter: Option<f64>,
    /// Number of requests [default: 14000]
    #[arg(long)]
    pub requests: Option<u64>,
}

/// Arguments of `--generate ten-stage`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Generated: ten-stage")]
pub struct TenStageArgs {
    /// New tokens before the first stage [default: 100000000]
    #[arg(long)]
    pub warm_up_tokens: Option<u64>,
    /// Tokens per stage [default: 20000000]
    #[arg(long)]
    pub stage_tokens: Option<u64>,
    /// Tokens per prompt [default: 8192]
    #[arg(long)]
    pub prompt_tokens: Option<u64>,
    /// Preference for the oldest prompts, from 0 (equally likely) to below 1 [default: 0.6]
    #[arg(long)]
    pub skew: Option<f64>,
}

/// Workloads by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Workload {
    /// Users with long histories, and questions in rounds
    MultiRoundQa,
    /// Stages of different expected hit rates
    TenStage,
}

/// Parts of a trace by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HalfName {
    /// The first half, for tuning
    First,
    /// The second half, for reporting
    Second,
    /// The whole trace
    Whole,
}

impl From<HalfName> for TracePart {
    fn from(name: HalfName) -> Self {
        match name {
            HalfName::First => Self::First,
            HalfName::Second => Self::Second,
            HalfName::Whole => Self::Whole,
        }
    }
}

fn policy(text: &str) -> Result<SimPolicy, String> {
    SimPolicy::parse(text.trim()).map_err(|error| error.to_string())
}

fn size(text: &str) -> Result<u64, String> {
    let bytes = parse_bytes(text).map_err(|error| error.to_string())?;
    let valid = (1..=1 << 30).contains(&bytes);
    if valid { Ok(bytes) } else { Err("expected a size from 1 B to 1 GiB".to_owned()) }
}

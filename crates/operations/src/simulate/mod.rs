//! `ritornello simulate`: replays of request traces through eviction policies, and a model of
//! prefill.

pub mod args;
pub mod pipeline;
mod report;
mod shares;

use args::{Model, SimulateArgs, Workload};
use report::Summary;
use ritornello_format::{Error, Result};
use ritornello_sim::generate::{MultiRoundQa, TenStage};
use ritornello_sim::{BadLines, Row, Trace, chart, read, simulate};
use ritornello_terminal::Context;
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::print::{json, print_stderr, print_stdout};
use ritornello_terminal::progress;
use serde::Serialize;
use std::path::Path;

/// Default tokens per block of a trace, as in Mooncake's traces.
const TRACE_BLOCK_TOKENS: u64 = 512;
/// Default tokens per block of a generated workload.
const GENERATED_BLOCK_TOKENS: u64 = 64;
/// Maximum number of skipped lines whose line numbers are printed.
const LINES_NAMED: usize = 10;

#[derive(Serialize)]
struct Answer {
    traces: Vec<Summary>,
    rows: Vec<Row>,
}

/// Replays traces through eviction policies, or computes the model of prefill of `simulate
/// pipeline`.
///
/// # Errors
/// `Unusable` for an unreadable trace or invalid numbers; `Failed` if the chart cannot be written.
pub fn run(context: &Context, args: &SimulateArgs) -> std::result::Result<Status, Failure> {
    if let Some(Model::Pipeline(args)) = &args.model {
        return pipeline::run(context, args);
    }
    let mut answer = Answer { traces: Vec::new(), rows: Vec::new() };
    type Given = std::result::Result<(Trace, u64), Failure>;
    let traces = args.traces.iter().map(|path| -> Given {
        let broken = if args.skip_broken { BadLines::Skip } else { BadLines::Fatal };
        Ok((from_file(path, broken)?, args.block_tokens.unwrap_or(TRACE_BLOCK_TOKENS)))
    });
    let generated = args.generate.iter().map(|workload| -> Given {
        let block_tokens = args.block_tokens.unwrap_or(GENERATED_BLOCK_TOKENS);
        Ok((generated(*workload, args, block_tokens)?, block_tokens))
    });
    for trace in traces.chain(generated) {
        let (trace, block_tokens) = trace?;
        let trace = trace.part(args.half.into());
        let block_bytes = block_tokens * args.token_bytes;
        warn(&trace);
        answer.rows.extend(rows(&trace, args, block_bytes)?);
        answer.traces.push(Summary {
            trace: trace.name().to_owned(),
            requests: trace.requests(),
            block_references: trace.references(),
            footprint_blocks: trace.footprint(),
            block_bytes,
            skipped_lines: trace.skipped().to_vec(),
            clock_jumps: trace.clock_jumps(),
        });
    }
    if let Some(path) = &args.chart {
        std::fs::write(path, chart(&answer.rows)).map_err(|error| {
            Failure::failed(format!("{}: {error}", path.display()), "--chart with another file")
        })?;
    }
    if context.json {
        json(&answer);
    } else {
        print_stdout(&report::tables(&answer.traces, &answer.rows));
    }
    Ok(Status::Fine)
}

fn from_file(path: &Path, broken: BadLines) -> std::result::Result<Trace, Failure> {
    let length = path.metadata().map_err(|error| {
        Failure::unusable(format!("{}: {error}", path.display()), "name a file with a trace")
    })?;
    let bar = progress::bar("reading");
    bar.set_length(length.len());
    let trace = read(path, broken, &mut |bytes| bar.set_position(bytes));
    bar.finish_and_clear();
    trace.map_err(|error| Failure::unusable(error.to_string(), ""))
}

fn warn(trace: &Trace) {
    let skipped = trace.skipped();
    if !skipped.is_empty() {
        let named: Vec<String> = skipped.iter().take(LINES_NAMED).map(u64::to_string).collect();
        let more = if skipped.len() > LINES_NAMED { ", ..." } else { "" };
        let named = named.join(", ");
        print_stderr(&format!(
            "{}: {} broken lines skipped: {named}{more}",
            trace.name(),
            skipped.len()
        ));
    }
    if trace.clock_jumps() > 0 {
        print_stderr(&format!(
            "{}: the clock goes back {} times; requests are replayed in the order of the lines",
            trace.name(),
            trace.clock_jumps()
        ));
    }
}

fn rows(trace: &Trace, args: &SimulateArgs, block_bytes: u64) -> Result<Vec<Row>> {
    if trace.references() == 0 {
        return Err(Error::invalid("this part of the trace has no blocks: replay the whole trace")
            .with("trace", trace.name()));
    }
    let (requests, cases) = (trace.requests() as u64, args.policy.len() * args.capacity.len());
    let bar = progress::steps(requests * cases as u64);
    let mut rows = Vec::with_capacity(cases);
    for &policy in &args.policy {
        for &capacity in &args.capacity {
            let done = rows.len() as u64 * requests;
            bar.set_message(format!(
                "requests: {}, {} at {} %",
                trace.name(),
                policy.word(),
                report::percent(capacity)
            ));
            let mut tell = |at| bar.set_position(done + at);
            rows.push(simulate(trace, policy, capacity, block_bytes, args.warm_up, &mut tell)?);
        }
    }
    bar.finish_and_clear();
    Ok(rows)
}

fn generated(workload: Workload, args: &SimulateArgs, block_tokens: u64) -> Result<Trace> {
    let seed = args.seed;
    match workload {
        Workload::MultiRoundQa => {
            let (given, usual) = (&args.multi_round_qa, MultiRoundQa::default());
            MultiRoundQa {
                users: given.users.unwrap_or(usual.users),
                rounds: given.rounds.unwrap_or(usual.rounds),
                qps: given.qps.unwrap_or(usual.qps),
                system_tokens: given.system_tokens.unwrap_or(usual.system_tokens),
                history_tokens: given.history_tokens.unwrap_or(usual.history_tokens),
                question_tokens: given.question_tokens.unwrap_or(usual.question_tokens),
                answer_tokens: given.answer_tokens.unwrap_or(usual.answer_tokens),
                jitter: given.jitter.unwrap_or(usual.jitter),
                requests: given.requests.unwrap_or(usual.requests),
                block_tokens,
                seed,
            }
            .generate()
        }
        Workload::TenStage => {
            let (given, usual) = (&args.ten_stage, TenStage::default());
            TenStage {
                warm_up_tokens: given.warm_up_tokens.unwrap_or(usual.warm_up_tokens),
                stage_tokens: given.stage_tokens.unwrap_or(usual.stage_tokens),
                prompt_tokens: given.prompt_tokens.unwrap_or(usual.prompt_tokens),
                skew: given.skew.unwrap_or(usual.skew),
                block_tokens,
                seed,
            }
            .generate()
        }
    }
}

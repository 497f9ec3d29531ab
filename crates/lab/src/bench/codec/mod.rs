//! `ritornello bench codec`: size and speed of codecs, and the effect of lossy codecs on attention.

mod attention;
mod data;
mod rates;
mod safetensors;

use clap::Args;
use data::DataSet;
use rates::Buffers;
use ritornello_codec::{Codec, Kernel};
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::print::{bytes, json, print_stdout, table};
use ritornello_terminal::value::size;
use ritornello_terminal::{Context, progress};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Instant;

/// Arguments of `bench codec`.
#[derive(Debug, Args)]
#[command(after_help = "\
How it measures. A slice holds one layer's keys and values of --page-tokens tokens and is encoded
separately. The slices of a set are repeated until they fill --total bytes, which should exceed the
processor's caches; every round copies, encodes and decodes them. A rate is the bytes before encoding
per second of one thread's processor time, the median of the rounds. What a lossless codec decodes is
compared bit by bit.

The error of a lossy codec is the change of softmax(QK/sqrt d)V if the keys and values of all tokens
are encoded and decoded: the norm of the difference over the norm of the original output. The mean
of the layers and the worst layer are printed.

Without --kv, keys and values are a small sample of the demonstration's model after some training. A
synthetic set whose keys have outlier channels is always measured as well.

Examples:
  ritornello bench codec
  ritornello bench codec --kv FILE.safetensors --json | jq '.rows[] | {codec, size_ratio}'
  build/env/vllm/bin/python engines/vllm/make_kv.py demo FILE.safetensors")]
pub struct CodecArgs {
    /// File of keys, values and queries, as engines/vllm/make_kv.py writes it
    #[arg(long)]
    pub kv: Option<PathBuf>,
    /// Bytes of keys and values that each thread encodes and decodes per round, rounded up to whole
    /// slices
    #[arg(long, default_value = "256MiB", value_parser = size)]
    pub total: u64,
    /// Tokens per slice
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub page_tokens: u32,
    /// Number of concurrent threads
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub threads: u32,
    /// Number of rounds; medians are reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
}

/// The report of `bench codec`.
#[derive(Debug, Serialize)]
struct Report {
    /// One row for each data set and codec; for the codec `split`, one for each kernel.
    rows: Vec<Row>,
    /// Source of the keys and values of the sets that are not synthetic.
    source: String,
    /// Bytes of keys and values that each thread encodes and decodes per round, before they are
    /// rounded up to whole slices.
    total_bytes: u64,
    /// Tokens per slice.
    page_tokens: u32,
    /// Concurrent threads; rates are per thread.
    threads: u32,
    /// Number of rounds; rates are their medians.
    runs: u32,
    /// Duration of the whole command, in seconds.
    seconds: f64,
}

/// One line of the report. Rates count the bytes before encoding.
#[derive(Debug, Serialize)]
struct Row {
    codec: &'static str,
    data: String,
    kernel: &'static str,
    /// Encoded bytes per input byte.
    size_ratio: f64,
    encode_gb_s: f64,
    decode_gb_s: f64,
    memcpy_gb_s: f64,
    /// Relative error of the attention output: the norm of the error over the norm of the output,
    /// averaged over the layers. Zero for lossless codecs.
    attention_error: f64,
    attention_error_worst: f64,
}

/// Measures all codecs except `raw`, and prints the report.
///
/// # Errors
/// If the file of keys and values is unusable, a codec fails, or a lossless codec loses bits.
pub fn run(context: &Context, args: &CodecArgs) -> Result<Status, Failure> {
    let started = Instant::now();
    let (source, sets) = data::sets(args.kv.as_deref())?;
    let plan = plan();
    let steps = progress::steps((sets.len() * plan.len()) as u64);
    let mut rows = Vec::new();
    for set in &sets {
        let slices = set.slices(args.page_tokens);
        let mut buffers = Buffers::new(&slices, args.total, args.threads);
        for &(codec, kernel) in &plan {
            steps.set_message(format!("{} on {}", codec.word(), set.name));
            rows.push(row(set, codec, kernel, args, &mut buffers)?);
            steps.inc(1);
        }
    }
    steps.finish_and_clear();
    let report = Report {
        rows,
        source,
        total_bytes: args.total,
        page_tokens: args.page_tokens,
        threads: args.threads,
        runs: args.runs,
        seconds: started.elapsed().as_secs_f64(),
    };
    if context.json {
        json(&report);
    } else {
        print_stdout(&show(&report));
    }
    Ok(Status::Fine)
}

/// Returns `split` with every kernel of this machine, and `zstd`, `int8` and `int4` with the
/// fastest kernel.
fn plan() -> Vec<(Codec, Kernel)> {
    let split = Kernel::available().iter().map(|&kernel| (Codec::Split, kernel));
    let others = [Codec::Zstd, Codec::Int8, Codec::Int4];
    split.chain(others.map(|codec| (codec, Kernel::best()))).collect()
}

fn row(
    set: &DataSet,
    codec: Codec,
    kernel: Kernel,
    args: &CodecArgs,
    buffers: &mut Buffers,
) -> Result<Row, Failure> {
    let rates = buffers.measure(codec, kernel, args.runs)?;
    let errors: Vec<f64> = if codec.is_lossless() {
        vec![0.0]
    } else {
        set.layers
            .iter()
            .map(|layer| attention::error(layer, &layer.through(codec, args.page_tokens)?))
            .collect::<Result<_, Failure>>()?
    };
    Ok(Row {
        codec: codec.word(),
        data: set.name.clone(),
        kernel: kernel.word(),
        size_ratio: rates.size_ratio,
        encode_gb_s: rates.encode_gb_s,
        decode_gb_s: rates.decode_gb_s,
        memcpy_gb_s: rates.memcpy_gb_s,
        attention_error: errors.iter().sum::<f64>() / errors.len() as f64,
        attention_error_worst: errors.iter().copied().fold(0.0, f64::max),
    })
}

fn show(report: &Report) -> String {
    let header = ["codec", "data", "kernel", "size", "encode GB/s", "decode GB/s", "memcpy GB/s"];
    let mut out = table(&[&header[..], &["mean attention error", "in the worst layer"]].concat());
    for row in &report.rows {
        let error = |error: f64| match error {
            0.0 => "none".to_owned(),
            error => format!("{:.2} %", error * 100.0),
        };
        out.add_row([
            row.codec.to_owned(),
            row.data.clone(),
            row.kernel.to_owned(),
            format!("{:.3}", row.size_ratio),
            format!("{:.1}", row.encode_gb_s),
            format!("{:.1}", row.decode_gb_s),
            format!("{:.1}", row.memcpy_gb_s),
            error(row.attention_error),
            error(row.attention_error_worst),
        ]);
    }
    format!(
        "{}; slices of one layer and {} tokens\n{out}\nrates of one of {} threads, which encodes {} per round; \
        medians of {} rounds; targets: codec split, at most 0.76 of the bytes at 10 GB/s; codec int8, at most 1 % \
         attention error",
        report.source,
        report.page_tokens,
        report.threads,
        bytes(report.total_bytes),
        report.runs
    )
}

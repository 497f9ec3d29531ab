//! `ritornello simulate pipeline`: a model of prefill after a loaded prefix.

use super::report::percent;
use super::shares::share;
use clap::{Args, ValueEnum};
use ritornello_sim::pipeline::{
    HALF_RATE_TOKENS_MAX, Medium, ModelShape, Prefill, Prices, PublishedRow, Rates, published,
};
use ritornello_terminal::Context;
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::plot::{self, Join, Line, Panel, Scale};
use ritornello_terminal::print::{count, json, print_stdout, table};
use ritornello_terminal::value::picture;
use serde::Serialize;
use std::path::PathBuf;

/// The media whose bubbles the chart draws. A medium is a source of prefixes and its path to the
/// device.
const DRAWN: [Medium; 3] = [Medium::HbmDram, Medium::DiskCopies, Medium::DiskLayered];
/// Hit rates of the chart: from, to, and the step, in tenths of a percent.
const DRAWN_FROM: u32 = 500;
const DRAWN_TO: u32 = 995;
const DRAWN_STEP: usize = 5;
/// Panels per row of the chart.
const ABREAST: usize = 2;

/// Arguments of `simulate pipeline`.
#[derive(Debug, Args)]
#[command(after_help = "\
This is a model: it measures nothing, and every figure it prints carries the word model. Layers are
computed in turn, each after its part of the prefix was read. The defaults are the published and
fitted parameters of docs/gpu-model.md; for the figures of a machine, give the machine's rates.

bubble: the time for which computing waits for reads. crossover: the largest hit rate at which
computing waits for the first layer only. The mean bubble, and the mean TTFT that gives the cost, are
over the values of --hit-rate.

HBM-DRAM: host memory, layer by layer. disk, CPU copies: computing begins after the last copy.
disk, layered: through host memory, layer by layer. GPU-issued: the device issues the reads.
The cost includes host memory, except of GPU-issued, and disks, except of HBM-DRAM.

Examples:
  ritornello simulate pipeline
  ritornello simulate pipeline --link-gbs 24 --disk-gbs 6.5 --copies-gbs 4 --tflops 120
  ritornello simulate pipeline --tokens 8192 --hit-rate 50%,90% --chart bubbles.svg
  ritornello simulate pipeline --json | jq '.rows[] | [.medium, .hit_rate, .model_ttft_seconds]'
  ritornello simulate pipeline --published")]
pub struct PipelineArgs {
    /// The model that is prefilled
    #[arg(long, value_enum, default_value = "llama3-8b")]
    pub shape: ShapeName,
    /// Tokens of a prompt, 2 to 16777216; several separated by commas
    #[arg(long, value_delimiter = ',', default_value = "32768,131072",
          value_parser = clap::value_parser!(u64).range(2..=1 << 24))]
    pub tokens: Vec<u64>,
    /// Shares of the prompt that are loaded, from 0% to below 100%
    #[arg(long, value_delimiter = ',', value_parser = share,
          default_value = "50%,75%,87.5%,93.75%,96.875%,98.4375%")]
    pub hit_rate: Vec<f64>,
    /// Rate from host memory to the device, in GB/s
    #[arg(long, default_value = "50", value_parser = positive)]
    pub link_gbs: f64,
    /// Rate of reads from the disk, with enough of them in flight to keep it busy, in GB/s
    #[arg(long, default_value = "25.9", value_parser = positive)]
    pub disk_gbs: f64,
    /// Rate from the disk to the device with copies that the CPU issues, in GB/s
    #[arg(long, default_value = "11.9", value_parser = positive)]
    pub copies_gbs: f64,
    /// Computing rate of long prompts, in TFLOP/s
    #[arg(long, default_value = "374", value_parser = positive)]
    pub tflops: f64,
    /// Number of new tokens, at most 8192, at which half of --tflops is reached
    #[arg(long, default_value = "440", value_parser = half_rate_tokens)]
    pub half_rate_tokens: f64,
    /// Price of the device, in dollars per hour
    #[arg(long, default_value = "5", value_parser = price)]
    pub gpu_price: f64,
    /// Price of host memory, in dollars per hour [default: 256 GB at 0.0088 per GB]
    #[arg(long, value_parser = price)]
    pub dram_price: Option<f64>,
    /// Price of the disks, in dollars per hour [default: 14 TB at 0.000082 per GB]
    #[arg(long, value_parser = price)]
    pub ssd_price: Option<f64>,
    /// Write a chart of the model's bubble over the hit rate: an SVG file
    #[arg(long, value_name = "FILE", value_parser = picture)]
    pub chart: Option<PathBuf>,
    /// Compare the model with published figures, computed with the parameters of their publications
    #[arg(long, conflicts_with_all = [
        "shape", "tokens", "hit_rate", "link_gbs", "disk_gbs", "copies_gbs", "tflops",
        "half_rate_tokens", "gpu_price", "dram_price", "ssd_price", "chart"])]
    pub published: bool,
}

/// Names of the models whose shapes are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ShapeName {
    /// 32 layers, 8 KV heads of 128, bfloat16: 128 KiB per token
    #[value(name = "llama3-8b")]
    Llama3,
    /// 24 layers, 2 KV heads of 64, bfloat16: 12 KiB per token
    #[value(name = "qwen2.5-0.5b")]
    Qwen25,
}

#[derive(Serialize)]
struct Answer {
    kind: &'static str,
    parameters: Parameters,
    rows: Vec<Row>,
    media: Vec<Total>,
}

#[derive(Serialize)]
struct Parameters {
    prefill: Prefill,
    rates: Rates,
    dollars_per_hour: Prices,
}

/// The model's figures of one prefill.
#[derive(Serialize)]
struct Row {
    tokens: u64,
    medium: Medium,
    hit_rate: f64,
    model_ttft_seconds: f64,
    model_compute_seconds: f64,
    model_bubble_seconds: f64,
}

/// Figures of one medium at one prompt length.
#[derive(Serialize)]
struct Total {
    tokens: u64,
    medium: Medium,
    model_crossover_hit_rate: Option<f64>,
    model_mean_bubble_seconds: f64,
    model_dollars_per_million_tokens: f64,
}

#[derive(Serialize)]
struct Comparison {
    kind: &'static str,
    published: Vec<PublishedRow>,
}

/// Computes the figures of the model and prints them.
///
/// # Errors
/// `Failed` if the chart cannot be drawn or written.
pub fn run(context: &Context, args: &PipelineArgs) -> Result<Status, Failure> {
    if args.published {
        let comparison = Comparison { kind: "model", published: published() };
        if context.json {
            json(&comparison);
        } else {
            print_stdout(&compared(&comparison.published));
        }
        return Ok(Status::Fine);
    }
    let parameters = Parameters::from(args);
    if let Some(path) = &args.chart {
        plot::write(path, &panels(&parameters, &args.tokens), ABREAST.min(args.tokens.len()))?;
    }
    let answer = Answer::new(parameters, &args.tokens, &args.hit_rate);
    if context.json {
        json(&answer);
    } else {
        print_stdout(&tables(&answer, &args.tokens, &args.hit_rate));
    }
    Ok(Status::Fine)
}

impl From<&PipelineArgs> for Parameters {
    fn from(args: &PipelineArgs) -> Self {
        let shape = match args.shape {
            ShapeName::Llama3 => ModelShape::LLAMA3_8B,
            ShapeName::Qwen25 => ModelShape::QWEN25_05B,
        };
        let [link, disk, copies] = [args.link_gbs, args.disk_gbs, args.copies_gbs].map(|r| r * 1e9);
        let (flops, half_rate_tokens) = (args.tflops * 1e12, args.half_rate_tokens);
        Self {
            prefill: Prefill { shape, flops, half_rate_tokens },
            rates: Rates { link, disk, copies },
            dollars_per_hour: Prices {
                gpu: args.gpu_price,
                dram: args.dram_price.unwrap_or(Prices::PUBLISHED.dram),
                ssd: args.ssd_price.unwrap_or(Prices::PUBLISHED.ssd),
            },
        }
    }
}

impl Answer {
    fn new(parameters: Parameters, lengths: &[u64], hit_rates: &[f64]) -> Self {
        let Parameters { prefill, rates, dollars_per_hour: prices } = &parameters;
        let (mut rows, mut media) = (Vec::new(), Vec::new());
        for &tokens in lengths {
            for medium in Medium::ALL {
                let (transfer, length) = (medium.transfer(rates), tokens as f64);
                let mut ttft = 0.0;
                for &hit_rate in hit_rates {
                    let outcome = prefill.at(&transfer, length, hit_rate);
                    ttft += outcome.ttft / hit_rates.len() as f64;
                    rows.push(Row {
                        tokens,
                        medium,
                        hit_rate,
                        model_ttft_seconds: outcome.ttft,
                        model_compute_seconds: outcome.compute,
                        model_bubble_seconds: outcome.bubble,
                    });
                }
                media.push(Total {
                    tokens,
                    medium,
                    model_crossover_hit_rate: prefill.crossover(&transfer, length),
                    model_mean_bubble_seconds: prefill.mean_bubble(&transfer, length, hit_rates),
                    model_dollars_per_million_tokens: prices
                        .per_million_tokens(medium, length, ttft),
                });
            }
        }
        Self { kind: "model", parameters, rows, media }
    }
}

fn tables(answer: &Answer, lengths: &[u64], hit_rates: &[f64]) -> String {
    let hits = hit_rates.iter().map(|hit| format!("{} %", percent(*hit)));
    let header: Vec<String> = std::iter::once("model: TTFT (bubble), ms".to_owned())
        .chain(hits)
        .chain(
            ["model crossover", "model mean bubble, ms", "model $ / million tokens"]
                .map(str::to_owned),
        )
        .collect();
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let mut texts = Vec::new();
    let mut each = answer.media.iter().zip(answer.rows.chunks(hit_rates.len().max(1)));
    for &tokens in lengths {
        let mut out = table(&header);
        for (total, rows) in each.by_ref().take(Medium::ALL.len()) {
            let times = rows.iter().map(|row| {
                format!("{} ({})", ms(row.model_ttft_seconds), ms(row.model_bubble_seconds))
            });
            let crossover = total.model_crossover_hit_rate;
            let totals = [
                crossover.map_or_else(|| "none".to_owned(), |hit| format!("{:.2} %", hit * 100.0)),
                ms(total.model_mean_bubble_seconds),
                format!("{:.4}", total.model_dollars_per_million_tokens),
            ];
            out.add_row(std::iter::once(total.medium.word().to_owned()).chain(times).chain(totals));
        }
        let all = answer.parameters.prefill.compute(0.0, tokens as f64);
        texts.push(format!(
            "model, {} tokens: computing all of them takes {} ms (model)\n{out}",
            count(tokens),
            ms(all)
        ));
    }
    texts.join("\n\n") + "\n\nAll figures above come from the model. Nothing was measured."
}

fn compared(rows: &[PublishedRow]) -> String {
    let mut out =
        table(&["figure", "published", "model", "reproduced", "fitted, assumed, or why not"]);
    for row in rows {
        let digits = if row.unit == "s" || row.unit == "GiB" { 2 } else { 1 };
        let number = |value: f64| format!("{value:.digits$} {}", row.unit);
        let reproduced = if row.reproduced { "yes" } else { "no" };
        out.add_row([row.figure, &number(row.published), &number(row.model), reproduced, row.why]);
    }
    format!("{out}\nFigures in the column `model` come from the model. Nothing was measured.")
}

fn panels(parameters: &Parameters, lengths: &[u64]) -> Vec<Panel> {
    let line = |medium: Medium, tokens: u64| {
        let transfer = medium.transfer(&parameters.rates);
        let points = (DRAWN_FROM..=DRAWN_TO).step_by(DRAWN_STEP).map(|tenths| {
            let hit = f64::from(tenths) / 1000.0;
            let outcome = parameters.prefill.at(&transfer, tokens as f64, hit);
            (hit * 100.0, outcome.bubble * 1e3)
        });
        Line { name: medium.word().to_owned(), points: points.collect(), join: Join::Straight }
    };
    let panel = |&tokens: &u64| Panel {
        title: format!("model: bubble in ms, {} tokens", count(tokens)),
        across: "hit rate, %".to_owned(),
        scale: Scale::Linear,
        lines: DRAWN.map(|medium| line(medium, tokens)).into(),
        marks: Vec::new(),
    };
    lengths.iter().map(panel).collect()
}

fn ms(seconds: f64) -> String {
    format!("{:.1}", seconds * 1e3)
}

fn positive(text: &str) -> Result<f64, String> {
    within(text, 1e-3, 1e6)
}

fn price(text: &str) -> Result<f64, String> {
    within(text, 0.0, 1e6)
}

fn half_rate_tokens(text: &str) -> Result<f64, String> {
    within(text, 0.0, HALF_RATE_TOKENS_MAX)
}

fn within(text: &str, low: f64, high: f64) -> Result<f64, String> {
    let number: Option<f64> = text.trim().parse().ok();
    let number = number.filter(|number| (low..=high).contains(number));
    number.ok_or_else(|| format!("expected a number from {low} to {high}"))
}

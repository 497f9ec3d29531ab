//! Published figures of a system whose GPU issues the reads, beside the figures of the model.
//!
//! The system is Tutti (arXiv 2605.03375), with Llama-3-8B and two drives. The figures of GDS are
//! compared with the model's [`Medium::DiskCopies`]. `R` and `n0` in [`PublishedRow::why`] are
//! parameters of the [model](super).

use super::{Medium, Prefill, Prices, Rates, Transfer};
use serde::Serialize;

const K: f64 = 1024.0;
/// Rate of the two drives by their data sheets, in bytes per second.
const DRIVES: f64 = 29e9;
/// Rate of plain files on an SSD, in bytes per second: fitted to the published TTFT of the row
/// `TTFT, SSD`.
const FILES: f64 = 3.4e9;
/// The hit rates over which the published mean bubble is assumed to be computed. Each hit rate has
/// half the misses of the preceding hit rate.
pub(super) const ASSUMED_HIT_RATES: [f64; 6] = [0.5, 0.75, 0.875, 0.9375, 0.968_75, 0.984_375];

/// A published figure, and the figure of the model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PublishedRow {
    /// Name of the figure.
    pub figure: &'static str,
    /// Unit of `published` and `model`.
    pub unit: &'static str,
    /// The published figure.
    pub published: f64,
    /// The figure that the model computes.
    pub model: f64,
    /// Whether the model reproduces the figure. If so, `published` and `model` differ by less than
    /// 5 %. A figure that also depends on quantities outside the model is not reproduced, even if
    /// `published` and `model` are close.
    pub reproduced: bool,
    /// Fitted or assumed parameters, or the reason why the figure is not reproduced.
    pub why: &'static str,
}

/// Returns the published figures and the figures of the model, whose parameters are published,
/// fitted or assumed.
#[must_use]
pub fn published() -> Vec<PublishedRow> {
    let (prefill, prices) = (Prefill::PUBLISHED, Prices::PUBLISHED);
    let [copies, issued] =
        [Medium::DiskCopies, Medium::GpuIssued].map(|medium| medium.transfer(&Rates::PUBLISHED));
    let files = Transfer { rate: FILES, layered: false };
    let drives = Transfer { rate: DRIVES, layered: true };
    let long = |transfer, prefix| prefill.run(transfer, prefix * K, (128.0 - prefix) * K).ttft;
    let saved = |prefix| 100.0 * (long(&issued, prefix) / long(&copies, prefix) - 1.0);
    let price = prices.per_hour(Medium::GpuIssued) / prices.per_hour(Medium::DiskCopies);
    // 60 GiB of KV in pieces of 16 tokens of one layer, 64 KiB each.
    let pieces = (60_u64 << 30) as f64 / (64.0 * K);
    let row = |figure, unit, published, model, reproduced, why| PublishedRow {
        figure,
        unit,
        published,
        model,
        reproduced,
        why,
    };
    vec![
        row(
            "crossover hit rate, 128k tokens",
            "%",
            98.3,
            100.0 * prefill.crossover(&drives, 128.0 * K).unwrap_or(0.0),
            true,
            "n0 is fitted to this row, with the 29 GB/s of the drives; 25.9 GB/s gives 98.1 %",
        ),
        row(
            "bubble at a hit rate of 93.75 %, 32k tokens",
            "ms",
            6.0,
            1e3 * prefill.at(&issued, 32.0 * K, 0.9375).bubble,
            false,
            "the model counts the read of layer 1, but no launches and completions of reads",
        ),
        row(
            "mean bubble, 32k tokens",
            "ms",
            25.0,
            1e3 * prefill.mean_bubble(&issued, 32.0 * K, &ASSUMED_HIT_RATES),
            true,
            "the hit rates are not published: 50 to 98.4 %, each with half the misses of the \
             previous, are assumed",
        ),
        row(
            "TTFT, GPU-issued, prefix of 112k of 128k tokens",
            "s",
            3.43,
            long(&issued, 112.0),
            true,
            "R is fitted to this row with n0 = 0",
        ),
        row(
            "TTFT, SSD, prefix of 112k of 128k tokens",
            "s",
            7.84,
            long(&files, 112.0),
            true,
            "the SSD's rate is fitted to this row: 3.4 GB/s without overlap",
        ),
        row(
            "TTFT against GDS, best",
            "%",
            -61.4,
            saved(124.0),
            false,
            "the prefix is not published: 124k of 128k tokens is assumed; 126k gives -65.9 %",
        ),
        row(
            "TTFT against GDS, prefix of 32k of 128k tokens",
            "%",
            -5.8,
            saved(32.0),
            false,
            "at 11.9 GB/s the read is 2.3 % of the TTFT, so no path saves more; a prefix of 64k gives \
             -5.8 %",
        ),
        row(
            "memory of PRP lists, 60 GiB of KV",
            "GiB",
            3.75,
            pieces * 4.0 * K / (K * K * K),
            true,
            "a list of 4 KiB per piece of 64 KiB; packed lists of 16 entries take 120 MiB",
        ),
        row(
            "memory of SGL descriptors, 60 GiB of KV",
            "MiB",
            15.0,
            pieces * 16.0 / (K * K),
            true,
            "16 bytes per piece of 64 KiB; 60 GiB are assumed for both rows of memory",
        ),
        row(
            "cost against GDS",
            "%",
            -27.0,
            100.0 * (price - 1.0),
            true,
            "at equal throughput, if GDS pays for host memory and the GPU-issued path does not",
        ),
        row(
            "cost against SSD",
            "%",
            -66.2,
            100.0 * (price * long(&issued, 112.0) / long(&files, 112.0) - 1.0),
            false,
            "the published cost needs 2.17 times the throughput, which the paper shows only in a \
             diagram; the model has no concurrent requests, and compares the TTFTs of the rows \
             with 112k",
        ),
    ]
}

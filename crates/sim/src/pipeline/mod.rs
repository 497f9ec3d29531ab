//! A model of prefill after a prefix whose pages are loaded: the time to the first token, and how
//! long computing waits for transfers. Nothing is measured.
//!
//! The time `T` at which the computing of a layer ends follows from the `T` of the layer before it:
//! `T = max(T, read of the layer done) + compute of the layer`. Reads are issued in the order of
//! the layers, one after another, at a constant rate. The time to compute `n` new tokens after `p`
//! tokens of the prefix is `(2·P·n + 4·n·(p + n/2)·W·L) / (R·n/(n + n0))`, in equal parts per
//! layer: `P` parameters, `W` elements of a token's query in one layer, `L` layers, `R` operations
//! per second that long prompts reach, and `n0` new tokens at which half of `R` is reached.

mod published;
#[cfg(test)]
mod tests;

pub use published::{PublishedRow, published};

use serde::Serialize;

/// Maximum of [`Prefill::half_rate_tokens`]. Up to this value a larger hit rate always means less
/// computing, for every shape of this module. [`Prefill::crossover`] relies on this.
pub const HALF_RATE_TOKENS_MAX: f64 = 8192.0;
/// Steps of the bisection for a crossover: the interval of hit rates shrinks below the precision of
/// `f64`.
const CROSSOVER_STEPS: usize = 60;

/// The properties of a language model that determine the time to compute its tokens and the bytes
/// to load.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ModelShape {
    /// Number of layers.
    pub layers: u32,
    /// Bytes of K and V per token, of all layers.
    pub token_bytes: f64,
    /// Number of parameters, without embeddings.
    pub parameters: f64,
    /// Elements of a token's query in one layer, over all heads.
    pub query_width: f64,
}

impl ModelShape {
    /// Llama-3-8B in bfloat16: 8 KV heads of 128, 32 query heads.
    pub const LLAMA3_8B: Self =
        Self { layers: 32, token_bytes: 131_072.0, parameters: 6.98e9, query_width: 4096.0 };
    /// Qwen2.5-0.5B in bfloat16: 2 KV heads of 64, 14 query heads.
    pub const QWEN25_05B: Self =
        Self { layers: 24, token_bytes: 12_288.0, parameters: 0.36e9, query_width: 896.0 };
}

/// How the pages of a prefix reach the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transfer {
    /// Bytes per second.
    pub rate: f64,
    /// Whether layers are computed while later layers are read. If not, computing begins after the
    /// last read.
    pub layered: bool,
}

/// Rates of a machine, in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rates {
    /// From host memory to the device.
    pub link: f64,
    /// From the disk, with enough requests in flight to keep the disk busy.
    pub disk: f64,
    /// From the disk to the device, if the CPU issues each copy.
    pub copies: f64,
}

impl Rates {
    /// The published rates of two drives and of the link of an H100: see `docs/gpu-model.md`.
    pub const PUBLISHED: Self = Self { link: 50e9, disk: 25.9e9, copies: 11.9e9 };
}

/// The source of a prefix, and the path to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Medium {
    /// Host memory, layer by layer.
    HbmDram,
    /// The disk, with copies that the CPU issues; computing begins after the last copy.
    DiskCopies,
    /// The disk through host memory, layer by layer. The transfers to host memory and to the device
    /// overlap, so the slower rate counts.
    DiskLayered,
    /// The disk, layer by layer, with reads that the device issues to the drive.
    GpuIssued,
}

impl Medium {
    /// All media, in the order of tables.
    pub const ALL: [Self; 4] =
        [Self::HbmDram, Self::DiskCopies, Self::DiskLayered, Self::GpuIssued];

    /// Returns the name in tables and charts.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::HbmDram => "HBM-DRAM",
            Self::DiskCopies => "disk, CPU copies",
            Self::DiskLayered => "disk, layered",
            Self::GpuIssued => "GPU-issued",
        }
    }

    /// Returns how pages from this medium reach the device of a machine with these rates.
    #[must_use]
    pub fn transfer(self, rates: &Rates) -> Transfer {
        let rate = match self {
            Self::HbmDram => rates.link,
            Self::DiskCopies => rates.copies,
            Self::DiskLayered => rates.disk.min(rates.link),
            Self::GpuIssued => rates.disk,
        };
        Transfer { rate, layered: self != Self::DiskCopies }
    }
}

/// Prices of a machine, in dollars per hour.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prices {
    /// The device.
    pub gpu: f64,
    /// All host memory of the machine.
    pub dram: f64,
    /// All disks of the machine.
    pub ssd: f64,
}

impl Prices {
    /// The published prices (see `docs/gpu-model.md`): 5 for the device, 0.0088 per GB of 256 GB of
    /// host memory, 0.000082 per GB of 14 TB of disks.
    pub const PUBLISHED: Self = Self { gpu: 5.0, dram: 256.0 * 0.0088, ssd: 14_000.0 * 0.000_082 };

    /// Returns the price, in dollars per hour, of the parts that a medium uses. All but the
    /// GPU-issued path use host memory.
    #[must_use]
    pub fn per_hour(&self, medium: Medium) -> f64 {
        let dram = if medium == Medium::GpuIssued { 0.0 } else { self.dram };
        let ssd = if medium == Medium::HbmDram { 0.0 } else { self.ssd };
        self.gpu + dram + ssd
    }

    /// Returns dollars per million prompt tokens, if prompts of `tokens` tokens are prefilled one
    /// after the other in `seconds` each.
    #[must_use]
    pub fn per_million_tokens(&self, medium: Medium, tokens: f64, seconds: f64) -> f64 {
        self.per_hour(medium) / 3600.0 * seconds / tokens * 1e6
    }
}

/// The outcome of one prefill, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Time to the first token.
    pub ttft: f64,
    /// Time to compute the new tokens.
    pub compute: f64,
    /// Waits of computing for reads, summed over the layers.
    pub bubble: f64,
}

/// A language model on a device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prefill {
    /// The properties of the language model.
    pub shape: ModelShape,
    /// Operations per second of long prompts.
    pub flops: f64,
    /// New tokens at which half of `flops` is reached, at most [`HALF_RATE_TOKENS_MAX`].
    pub half_rate_tokens: f64,
}

impl Prefill {
    /// Llama-3-8B on the device of the published figures. `flops` and `half_rate_tokens` are fitted
    /// to published results: see `published.rs`.
    pub const PUBLISHED: Self =
        Self { shape: ModelShape::LLAMA3_8B, flops: 374e12, half_rate_tokens: 440.0 };

    /// Returns the seconds to compute `new` tokens that follow `prefix` tokens.
    #[must_use]
    pub fn compute(&self, prefix: f64, new: f64) -> f64 {
        let attention =
            4.0 * (prefix + new / 2.0) * self.shape.query_width * f64::from(self.shape.layers);
        // The factor `n` of the work cancels the `n` in the rate.
        (2.0 * self.shape.parameters + attention) * (new + self.half_rate_tokens) / self.flops
    }

    /// Returns the outcome for `new` tokens after a prefix of `prefix` tokens, which is read.
    #[must_use]
    pub fn run(&self, transfer: &Transfer, prefix: f64, new: f64) -> Outcome {
        let layers = self.shape.layers;
        let compute = self.compute(prefix, new);
        let step = compute / f64::from(layers);
        let read = prefix * self.shape.token_bytes / transfer.rate;
        let (mut now, mut bubble) = (0.0_f64, 0.0);
        for layer in 1..=layers {
            let share = if transfer.layered { f64::from(layer) / f64::from(layers) } else { 1.0 };
            let wait = (read * share - now).max(0.0);
            bubble += wait;
            now += wait + step;
        }
        Outcome { ttft: now, compute, bubble }
    }

    /// Returns the outcome for a prompt of which the share `hit_rate` is read. At least one token
    /// is computed.
    #[must_use]
    pub fn at(&self, transfer: &Transfer, tokens: f64, hit_rate: f64) -> Outcome {
        let new = (tokens * (1.0 - hit_rate)).max(1.0);
        self.run(transfer, tokens - new, new)
    }

    /// Returns the mean of [`Outcome::bubble`] over `hit_rates`, in seconds; 0 if `hit_rates` is
    /// empty.
    #[must_use]
    pub fn mean_bubble(&self, transfer: &Transfer, tokens: f64, hit_rates: &[f64]) -> f64 {
        let sum: f64 = hit_rates.iter().map(|hit| self.at(transfer, tokens, *hit).bubble).sum();
        sum / hit_rates.len().max(1) as f64
    }

    /// Returns the largest hit rate at which reading a layer takes no longer than computing a
    /// layer, so that computing waits only for the first layer. `None` if `transfer` is not
    /// layered.
    #[must_use]
    pub fn crossover(&self, transfer: &Transfer, tokens: f64) -> Option<f64> {
        let hidden = |hit: f64| {
            let prefix = tokens * hit;
            prefix * self.shape.token_bytes / transfer.rate <= self.compute(prefix, tokens - prefix)
        };
        if !transfer.layered {
            return None;
        }
        if hidden(1.0) {
            return Some(1.0);
        }
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..CROSSOVER_STEPS {
            let middle = (low + high) / 2.0;
            if hidden(middle) { low = middle } else { high = middle }
        }
        Some(low)
    }
}

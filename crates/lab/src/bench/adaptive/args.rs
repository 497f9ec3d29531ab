//! Arguments of `bench adaptive`.

use clap::Args;
use ritornello_format::parse_bytes;
use ritornello_index::tuning::Setting;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Arguments of `bench adaptive`.
#[derive(Debug, Args)]
#[command(after_help = "\
How it measures. The ten-stage workload is the trace of `simulate --generate ten-stage`, scaled to
--entries. It runs on the index `lsm`, without payload: a request probes for
256 pages, marks the runs found as used, and inserts the missing pages in runs of 32. A second
thread maintains the index every 20 ms and syncs it every 2 s, as a store does. The warm-up inserts
half of the pages and is not counted; the stages follow. In one variant the controller adapts the
setting of the tree, its size ratio and runs per level (T/K), to the workload. In the others the
setting is fixed: read-optimal (12/1), write-optimal (12/11), and some between. Each variant is a
separate process; every round runs all variants; the median of the rounds is printed.

Cost is processor seconds of the whole process during the stages: the index operations, RocksDB's
threads, and the compactions still to do at the end, without the generation of the workload. Bytes
written are what the kernel counts as written to storage, up to the end of these compactions.

By default all variants run twice: with a memtable that holds all pages, and with a small memtable.

Then a switch of the setting: while the stages run, the target alternates between 4/1 and 6/5, and
puts are timed separately while the tree moves to a target and while it has its target setting.

Last, the same requests are replayed without an index, for three hit rates: of the store, of one
file per page, and of memory that a restart in the middle empties. Each has half of the bytes that
all pages take.

Examples:
  ritornello bench adaptive
  ritornello bench adaptive --entries 200000 --stages 4 --rounds 1 --memtable 1MiB
  ritornello bench adaptive --chart adaptive.svg --json | jq '.rows[] | [.memtable, .name, .cost_s]'")]
pub struct AdaptiveArgs {
    /// Pages in the index after all ten stages, 20,000 to 100,000,000
    #[arg(long, default_value_t = 600_000,
          value_parser = clap::value_parser!(u64).range(20_000..=100_000_000))]
    pub entries: u64,
    /// Number of stages to run after the warm-up, 1 to 10
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10))]
    pub stages: u32,
    /// Memtable sizes to measure with, in bytes [default: 512 bytes per page, and 2 MiB]
    #[arg(long, value_delimiter = ',', value_parser = size)]
    pub memtable: Vec<u64>,
    /// Fixed settings to compare the controller with, as T/K: size ratio and runs per level
    #[arg(long, value_delimiter = ',', default_value = "12/1,12/11,4/1,8/3,8/7")]
    pub settings: Vec<SettingArg>,
    /// Probes per request
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub probes: u32,
    /// Number of rounds; medians are reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Bytes per page, for the hit rates
    #[arg(long, default_value = "192KiB", value_parser = size)]
    pub page_bytes: u64,
    /// A directory on the disk to measure [default: the current directory, or a temporary
    /// directory if the current one is in memory]
    #[arg(long)]
    pub dir: Option<PathBuf>,
    /// Write a chart of shapes, costs and latencies with the smallest memtable: an SVG file
    #[arg(long, value_name = "FILE")]
    pub chart: Option<PathBuf>,
}

/// Arguments of the part that runs the workload in a separate process.
#[derive(Clone, Debug, Args)]
pub struct AdaptivePart {
    /// Directory for the index
    pub dir: PathBuf,
    /// Pages in the index after all ten stages
    #[arg(long)]
    pub entries: u64,
    /// Number of stages
    #[arg(long)]
    pub stages: u32,
    /// Bytes of the memtable
    #[arg(long)]
    pub memtable: u64,
    /// Probes per request
    #[arg(long)]
    pub probes: u32,
    /// The fixed setting; without it the controller is on
    #[arg(long)]
    pub setting: Option<SettingArg>,
    /// Second setting of the target, which alternates between `setting` and this setting
    #[arg(long)]
    pub swing: Option<SettingArg>,
}

/// A setting on the command line, as size ratio/runs per level: `4/3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SettingArg(pub Setting);

impl FromStr for SettingArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once('/').and_then(|(ratio, runs)| {
            Some(Setting { ratio: ratio.trim().parse().ok()?, runs: runs.trim().parse().ok()? })
        });
        numbers
            .filter(|of| (2..=12).contains(&of.ratio) && (1..of.ratio).contains(&of.runs))
            .map(Self)
            .ok_or_else(|| "expected T/K with T from 2 to 12 and K from 1 to T - 1".to_owned())
    }
}

impl fmt::Display for SettingArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.0.ratio, self.0.runs)
    }
}

fn size(text: &str) -> Result<u64, String> {
    let bytes = parse_bytes(text).map_err(|error| error.to_string())?;
    let valid = (1..=1 << 40).contains(&bytes);
    if valid { Ok(bytes) } else { Err("expected a size from 1 B to 1 TiB".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_parse_from_text() {
        let value: SettingArg = "4/3".parse().unwrap();
        assert_eq!((value.0, value.to_string().as_str()), (Setting { ratio: 4, runs: 3 }, "4/3"));
        for bad in ["4", "4/4", "1/1", "13/2", "x/1", "4/0"] {
            assert!(bad.parse::<SettingArg>().is_err(), "{bad}");
        }
    }
}

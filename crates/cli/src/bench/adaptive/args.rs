//! What can be typed behind `bench adaptive`.

use clap::Args;
use ritornello_format::parse_bytes;
use ritornello_index::tuning::Setting;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Of `bench adaptive`.
#[derive(Debug, Args)]
#[command(after_help = "\
How it measures. The ten-stage workload is asked of the index `lsm`, without payload: a request
probes for 256 pages, reads where those that are there lie, and inserts the others in runs of 32. A
second thread maintains the index every 20 ms and syncs it every 2 s, as a store does. First comes
the warm-up, which is half of the pages and not counted; then the stages. The controller is on, or
the size ratio and the runs a level stay: read-optimal (12/1), write-optimal (12/11), and some
between. Each is a process of its own; rounds go through all of them in turn; what is printed is the
median of the rounds.

Cost is processor seconds of the whole process during the stages: the index operations, RocksDB's
threads, and the compactions that are still owed at the end. Making the workload is not in it. Bytes
written are what the kernel counts as written to storage, synced.

It is measured twice: with a memtable that holds everything, and with a small one.

Then a switch of the setting: while the stages run, the target goes back and forth between 4/1 and
6/5, and puts are timed while the tree is on its way and while it is not.

Last, without an index: the hit rate of the store on the same requests, in half of the bytes that
all pages take, against one file a page and against memory of the same size that a restart in the
middle empties.

Examples:
  ritornello bench adaptive
  ritornello bench adaptive --entries 200000 --stages 4 --rounds 1 --memtable 1MiB
  ritornello bench adaptive --chart adaptive.svg --json | jq '.rows[] | [.memtable, .name, .cost_s]'")]
pub struct AdaptiveArgs {
    /// Pages after the last stage
    #[arg(long, default_value_t = 600_000,
          value_parser = clap::value_parser!(u64).range(20_000..=100_000_000))]
    pub entries: u64,
    /// Stages
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10))]
    pub stages: u32,
    /// Memtables [default: 512 bytes a page, and 2 MiB]
    #[arg(long, value_delimiter = ',', value_parser = size)]
    pub memtable: Vec<u64>,
    /// Settings to compare with, as T/K
    #[arg(long, value_delimiter = ',', default_value = "12/1,12/11,4/1,8/3,8/7")]
    pub settings: Vec<Knobs>,
    /// Probes a request
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub probes: u32,
    /// Rounds; the median counts
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Bytes a page, for the hit rates
    #[arg(long, default_value = "192KiB", value_parser = size)]
    pub page_bytes: u64,
    /// A directory on the disk to measure [default: here, or a temporary one if this is memory]
    #[arg(long)]
    pub dir: Option<PathBuf>,
    /// Draw shapes, costs and latencies, with the smallest memtable: an SVG file
    #[arg(long, value_name = "FILE")]
    pub chart: Option<PathBuf>,
}

/// Of the part that runs the workload in a process of its own.
#[derive(Clone, Debug, Args)]
pub struct AdaptivePart {
    /// A directory of its own
    pub dir: PathBuf,
    /// Pages after the last stage
    #[arg(long)]
    pub entries: u64,
    /// Stages
    #[arg(long)]
    pub stages: u32,
    /// Bytes
    #[arg(long)]
    pub memtable: u64,
    /// Probes a request
    #[arg(long)]
    pub probes: u32,
    /// The setting that stays; without, the controller is on
    #[arg(long)]
    pub setting: Option<Knobs>,
    /// Where the target goes back and forth, from `setting`
    #[arg(long)]
    pub swing: Option<Knobs>,
}

/// A setting as people type it: `4/3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Knobs(pub Setting);

impl FromStr for Knobs {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once('/').and_then(|(ratio, runs)| {
            Some(Setting { ratio: ratio.trim().parse().ok()?, runs: runs.trim().parse().ok()? })
        });
        numbers
            .filter(|of| (2..=12).contains(&of.ratio) && (1..of.ratio).contains(&of.runs))
            .map(Self)
            .ok_or_else(|| "T/K with T from 2 to 12 and K from 1 to T - 1".to_owned())
    }
}

impl fmt::Display for Knobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.0.ratio, self.0.runs)
    }
}

fn size(text: &str) -> Result<u64, String> {
    let bytes = parse_bytes(text).map_err(|error| error.to_string())?;
    if (1..=1 << 40).contains(&bytes) { Ok(bytes) } else { Err("from 1 B to 1 TiB".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knobs_as_people_type_them() {
        let knobs: Knobs = "4/3".parse().unwrap();
        assert_eq!((knobs.0, knobs.to_string().as_str()), (Setting { ratio: 4, runs: 3 }, "4/3"));
        for bad in ["4", "4/4", "1/1", "13/2", "x/1", "4/0"] {
            assert!(bad.parse::<Knobs>().is_err(), "{bad}");
        }
    }
}

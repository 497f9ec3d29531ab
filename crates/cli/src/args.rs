//! The command line.

use crate::convert::ConvertArgs;
use crate::doctor::DoctorArgs;
use crate::fsck::FsckArgs;
use crate::remote::RemoteArgs;
use crate::serve::ServeArgs;
use crate::simulate::args::SimulateArgs;
use crate::space::{DestroyArgs, PathsArgs, ResizeArgs};
use crate::stat::StatArgs;
use crate::top::TopArgs;
use clap::{Parser, Subcommand};
use ritornello_lab::bench::BenchArgs;
use ritornello_lab::soak::args::SoakArgs;

/// The command line.
#[derive(Debug, Parser)]
#[command(
    name = "ritornello",
    version,
    about = "The command of the Ritornello KV-cache store",
    after_help = "\
Exit codes:
  0  the command found no problem
  1  the command succeeded and found a problem
  2  the command line is invalid, or the store cannot be opened
  3  the command failed

Examples:
  ritornello stat /nvme/kv
  ritornello fsck /nvme/kv --salvage
  ritornello serve /nvme/kv --capacity 200GiB
  ritornello doctor /nvme/kv --capacity 200GiB
  ritornello bench store --dir /nvme --shape llama3-8b --page-tokens 64
  ritornello soak --minutes 10 --dir /nvme
  ritornello simulate traces/mooncake_conversation.jsonl.gz --chart hit-rates.svg
  ritornello top /nvme/kv
  ritornello remote stat s3://bucket/kv

RUST_LOG=info prints more on standard error."
)]
pub struct Cli {
    /// Print one JSON object on standard output instead of tables
    #[arg(long, global = true)]
    pub json: bool,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show the contents, the resources and the state of a store
    Stat(StatArgs),
    /// Read and verify every page of a store that no process uses
    Fsck(FsckArgs),
    /// Own a store for other processes until a signal ends the command
    Serve(ServeArgs),
    /// Make a store larger or smaller while it is in use
    Resize(ResizeArgs),
    /// List, add or drain the directories of a store while it is in use
    Paths(PathsArgs),
    /// Convert the index of a store that no process uses
    ConvertIndex(ConvertArgs),
    /// Remove a store that no process uses
    Destroy(DestroyArgs),
    /// Test a directory, and recommend changes of this machine
    Doctor(DoctorArgs),
    /// Measure the store against the limits of this machine
    Bench(BenchArgs),
    /// Load a small store for a long time, kill and restart it, and check every byte
    Soak(SoakArgs),
    /// Replay request traces through eviction policies: hit rates, writes, the bound
    Simulate(SimulateArgs),
    /// Inspect, verify or clean up a remote
    Remote(RemoteArgs),
    /// Watch a store: hit rate, space, eviction, leases
    Top(TopArgs),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_definitions_are_valid_and_have_examples() {
        Cli::command().debug_assert();
        let mut waiting = vec![Cli::command()];
        while let Some(mut command) = waiting.pop() {
            let help = command.render_help().to_string();
            assert!(help.contains("Examples:"), "{}", command.get_name());
            let inner = command.get_subcommands();
            waiting.extend(inner.filter(|c| !c.is_hide_set() && c.get_name() != "help").cloned());
        }
    }
}

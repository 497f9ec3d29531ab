//! `ritornello bench clients`: rates and latencies of a client, compared with the owner's.
//!
//! | module | contents |
//! |---|---|
//! | `client` | a client: a separate process, which reads one command per line |
//! | `pages` | the pages of owner and clients |
//! | `report` | the figures |

pub mod client;
mod pages;
mod report;

use super::child::self_command;
use super::disk;
use super::driver::LoadDriver;
use super::quantile::median;
use super::shape::Shape;
use clap::Args;
use client::{Latencies, Transferred, latencies};
use pages::{LONG_PAGES, LONG_SET, MATCH_PAGES, MATCH_SEQUENCES, MATCH_SET, data, short};
use report::{Report, Row};
use ritornello_store::{Options, SEGMENT_BYTES};
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::print::{json, print_stdout};
use ritornello_terminal::scratch::Scratch;
use ritornello_terminal::value::size;
use ritornello_terminal::{Context, open, progress};
use ritornello_volume::baseline::Rate;
use serde::de::DeserializeOwned;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Arguments of `bench clients`.
#[derive(Debug, Args)]
#[command(after_help = "\
How it measures. This process owns a store; clients are separate processes. Each of --runs rounds
puts and flushes --total bytes and gets them back, once here and once in a client; in every second
round the client is first. A ratio is the client's rate divided by this process's rate in the same
round; the report has medians over the rounds. Every byte read is compared; the comparison is not
timed.

Latencies are of 4,000 probes and 4,000 leases of 256 stored pages, and of 500 probes of 4,096 pages
(as many pages as sixteen of the other probes): in this process, from a single client, and from a client while
--clients other clients lease, put and get without pause.

Examples:
  ritornello bench clients
  ritornello bench clients --dir /nvme --clients 8 --page-bytes 2MiB --total 1GiB
  ritornello bench clients --json | jq '.crowded.lease.p99_us'")]
pub struct ClientsArgs {
    /// Number of busy clients
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub clients: u32,
    /// Bytes per page put and read
    #[arg(long, default_value = "192KiB", value_parser = size)]
    pub page_bytes: u64,
    /// Bytes put, and then read, by the owner and by the client in each round, rounded down to
    /// whole calls of 64 pages, at least one call
    #[arg(long, default_value = "256MiB", value_parser = size)]
    pub total: u64,
    /// Number of rounds; medians are reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
    /// A directory on the disk to measure [default: the current directory, or a temporary
    /// directory if the current one is in memory]
    #[arg(long)]
    pub dir: Option<PathBuf>,
    /// Bytes per segment file
    #[arg(long, hide = true, value_parser = size)]
    pub segment_bytes: Option<u64>,
}

/// Number of the first set of sequences that is put and read. Each round uses two sets: one in the
/// owner, one in a client.
const DATA_SET: u32 = 100;
/// Number of the set of the first busy client.
const BUSY_SET: u32 = 1000;

/// Measures and prints the report.
///
/// # Errors
/// If space is missing, a call or a process fails, or wrong bytes are read.
pub fn run(context: &Context, args: &ClientsArgs) -> Result<Status, Failure> {
    let shape = data(args.page_bytes, args.total);
    // Space for all sets of data, the sets of busy clients, and the small pages.
    let sets = 2 * args.runs + args.clients + 1;
    let all = Shape { sequences: shape.sequences * sets, ..shape.clone() };
    let segment_bytes = args.segment_bytes.unwrap_or(SEGMENT_BYTES);
    let bytes = all.capacity(segment_bytes)? + (128 << 20);
    let dir = disk::choose(args.dir.as_deref(), bytes)?;
    let scratch = Scratch::new(&dir, "clients")?;
    let steps = progress::steps(4);
    let store_dir = scratch.path().join("store");
    let mut options = Options::new(&store_dir);
    (options.capacity, options.segment_bytes) = (Some(bytes), Some(segment_bytes));
    let node = open::with(&options)?;
    let store = node.store();
    steps.set_message("filling");
    LoadDriver::new(&short(MATCH_PAGES, MATCH_SEQUENCES))?.put(
        store,
        MATCH_SET,
        MATCH_SEQUENCES,
    )?;
    LoadDriver::new(&short(LONG_PAGES, 1))?.put(store, LONG_SET, 1)?;
    steps.inc(1);

    let processes = Processes { context, store_dir: &store_dir, args };
    let mut client = processes.start()?;
    let own = latencies(store)?;
    let alone: Latencies = client.ask("match")?;
    steps.inc(1);

    steps.set_message("putting and getting");
    let mut driver = LoadDriver::new(&shape)?;
    let mut moved = Vec::new();
    for round in 0..args.runs {
        let set = DATA_SET + 2 * round;
        let own = |driver: &mut LoadDriver| -> Result<[Rate; 2], Failure> {
            let put = driver.put(store, set, shape.sequences)?;
            Ok([put, driver.get(store, set, shape.sequences)?])
        };
        let mut other = || client.ask::<[Transferred; 2]>(&format!("move {}", set + 1));
        // The client is first in every second round, so that a drift of the disk affects both
        // equally.
        let (own, other) = if round % 2 == 0 {
            let own = own(&mut driver)?;
            (own, other()?)
        } else {
            let other = other()?;
            (own(&mut driver)?, other)
        };
        moved.push([0, 1].map(|at| (own[at].gib_s(), other[at].gib_s)));
    }
    steps.inc(1);

    steps.set_message("probing and leasing while clients are busy");
    let mut busy = (0..args.clients).map(|_| processes.start()).collect::<Result<Vec<_>, _>>()?;
    for (number, busy) in (0..).zip(&mut busy) {
        busy.ask::<bool>(&format!("busy {}", BUSY_SET + number))?;
    }
    let crowded: Latencies = client.ask("match")?;
    drop(busy);
    steps.finish_and_clear();
    drop(client);
    node.close()?;
    drop(scratch);

    let rates = |what: usize| {
        let rates = |of: &dyn Fn(&(f64, f64)) -> f64| {
            median(&moved.iter().map(|round| of(&round[what])).collect::<Vec<_>>())
        };
        Row {
            own_gib_s: rates(&|(own, _)| *own),
            client_gib_s: rates(&|(_, client)| *client),
            ratio: rates(&|(own, client)| client / own),
            ratios: moved.iter().map(|round| round[what].1 / round[what].0).collect(),
        }
    };
    let (clients, page_bytes, total) = (args.clients, args.page_bytes, shape.total());
    let (put, get) = (rates(0), rates(1));
    let report = Report { own, alone, crowded, clients, put, get, page_bytes, total };
    if context.json {
        json(&report);
    } else {
        print_stdout(&report.show());
    }
    Ok(Status::Fine)
}

/// Arguments with which clients are started.
struct Processes<'a> {
    context: &'a Context,
    store_dir: &'a Path,
    args: &'a ClientsArgs,
}

impl Processes<'_> {
    fn start(&self) -> Result<Client, Failure> {
        let mut command = self_command(self.context)?;
        command.arg("client").arg(self.store_dir);
        command.args(["--page-bytes", &self.args.page_bytes.to_string()]);
        command.args(["--total", &self.args.total.to_string()]);
        Client::start(command)
    }
}

struct Client {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Client {
    fn start(mut command: Command) -> Result<Self, Failure> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(input), Some(output)) => {
                Ok(Self { child, input, output: BufReader::new(output) })
            }
            _ => Err(Failure::failed("a client process has no pipes", "report this")),
        }
    }

    fn ask<T: DeserializeOwned>(&mut self, what: &str) -> Result<T, Failure> {
        writeln!(self.input, "{what}")?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        serde_json::from_str(&line).map_err(|error| {
            let line = format!("a client process gave no valid answer: {error}");
            Failure::failed(line, "the output above, which names the cause")
        })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! `ritornello bench table`: walks of the page table, compared with dependent reads of memory.

use super::quantile::quantile;
use clap::Args;
use ritornello_format::PageHash;
use ritornello_index::synthetic::mix;
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::print::{count, json, print_stdout, table};
use ritornello_terminal::{Context, progress};
use ritornello_tiers::{PageTable, Residence, Tier};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Arguments of `bench table`.
#[derive(Debug, Args)]
#[command(after_help = "\
How it measures. A walk visits a prompt of 256 pages in a page table of --nodes nodes; warm walks
alternate between four prompts, cold walks visit another prompt each time. A node is a span of pages
in one state, at worst one page. A walk is compared with as many reads of memory as it visits nodes,
each at an address that the previous read returned: for warm walks the reads cycle through one cache
line for each node of the four prompts, for cold walks through 256 bytes of memory for each node of
the page table.

Examples:
  ritornello bench table
  ritornello bench table --nodes 100000 --json | jq '.rows[] | {pages_per_node, walk_p50_us}'")]
pub struct TableArgs {
    /// Nodes of the page table, 1,024 to 4,000,000
    #[arg(long, default_value_t = 1_000_000,
          value_parser = clap::value_parser!(u64).range(1024..=4_000_000))]
    pub nodes: u64,
    /// Pages per node: powers of two from 1 to 256, each measured separately
    #[arg(long, value_delimiter = ',', default_value = "32,16,8,4,2,1", value_parser = node_pages)]
    pub pages_per_node: Vec<u64>,
}

fn node_pages(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(pages @ 1..=256_u64) if pages.is_power_of_two() => Ok(pages),
        _ => Err("expected a power of two up to 256".to_owned()),
    }
}

/// Pages of a prompt.
const PAGES: usize = 256;
/// Timed walks of each kind.
const WALKS: usize = 20_000;
/// Prompts that warm walks alternate between.
const WARM: usize = 4;
/// Bytes of a cache line. [`NODE`] is the bytes of memory for each node of the page table: the
/// reads that are compared with cold walks cycle through this memory.
const LINE: usize = 64;
const NODE: usize = 4 * LINE;

#[derive(Serialize)]
struct Report {
    prompt_pages: usize,
    rows: Vec<Row>,
}

/// Figures of walks over prompts whose pages are all present.
#[derive(Serialize)]
struct Row {
    nodes: u64,
    pages: u64,
    /// Pages per node. Consecutive nodes are on different tiers.
    pages_per_node: usize,
    nodes_per_walk: usize,
    /// Median of warm walks, which alternate between [`WARM`] prompts.
    walk_p50_us: f64,
    walk_p99_us: f64,
    /// Median of `nodes_per_walk` reads, each at an address that the previous read returned. The
    /// reads cycle through one cache line for each node that the warm walks visit.
    reads_p50_us: f64,
    /// Median of cold walks, each of another prompt.
    cold_p50_us: f64,
    /// Median of `nodes_per_walk` reads, each at an address that the previous read returned. The
    /// reads cycle through [`NODE`] bytes of memory for each of `nodes`.
    cold_reads_p50_us: f64,
    /// Maximum processor time for inserting one node while the table was filled. A walk at the same
    /// time may wait for an insertion.
    change_max_us: f64,
}

/// Measures and prints the report.
///
/// # Errors
/// If a walk does not find pages that are present.
pub fn run(context: &Context, args: &TableArgs) -> Result<Status, Failure> {
    let steps = progress::steps(args.pages_per_node.len() as u64);
    let mut rows = Vec::new();
    for pages in &args.pages_per_node {
        steps.set_message(format!("nodes of {pages} pages"));
        rows.push(measure(args.nodes as usize, *pages as usize)?);
        steps.inc(1);
    }
    steps.finish_and_clear();
    let report = Report { prompt_pages: PAGES, rows };
    if context.json {
        json(&report);
    } else {
        print_stdout(&show(&report));
    }
    Ok(Status::Fine)
}

fn show(report: &Report) -> String {
    let mut shown = table(&[
        "nodes",
        "pages per node",
        "warm walk p50 us",
        "warm walk p99 us",
        "warm reads p50 us",
        "cold walk p50 us",
        "cold reads p50 us",
    ]);
    for row in &report.rows {
        let us = |us: f64| format!("{us:.2}");
        shown.add_row([
            count(row.nodes),
            row.pages_per_node.to_string(),
            us(row.walk_p50_us),
            us(row.walk_p99_us),
            us(row.reads_p50_us),
            us(row.cold_p50_us),
            us(row.cold_reads_p50_us),
        ]);
    }
    format!("{shown}\nwalks of {} pages; reads: one for each node of a walk", report.prompt_pages)
}

fn measure(nodes: usize, pages_per_node: usize) -> Result<Row, Failure> {
    let table = PageTable::new();
    let prompts = (nodes * pages_per_node / PAGES).max(WARM);
    let mut change_max_us = 0.0_f64;
    for number in 0..prompts {
        let pages = prompt(number);
        for (at, from) in (0..PAGES).step_by(pages_per_node).enumerate() {
            // Neighbouring nodes are on different tiers, so that they do not merge.
            let tier = if at % 2 == 0 { Tier::Host } else { Tier::Disk };
            let started = busy();
            for claimed in
                table.claim(tier, Residence::Storing, &pages, from..from + pages_per_node)
            {
                table.mark_present(tier, &pages, claimed, &[]);
            }
            change_max_us = change_max_us.max((busy() - started).as_secs_f64() * 1e6);
        }
    }
    let stats = table.stats();
    let warm: Vec<Vec<PageHash>> =
        (0..WARM).map(|number| prompt(number * 7919 % prompts)).collect();
    let walks = times(|at| walk(&table, &warm[at % WARM]))?;
    // Take large steps, so that consecutive walks visit prompts far from each other.
    let cold = |at: usize| prompt(at.wrapping_mul(0x9e37_79b9_7f4a_7c15) % prompts);
    let cold = times(|at| walk(&table, &cold(at)))?;
    drop(table);
    let nodes_per_walk = PAGES / pages_per_node;
    let lines = stats.nodes as usize * NODE / LINE;
    let reads = |lines, of| -> Result<f64, Failure> {
        let mut chase = Chase::new(lines, of);
        Ok(quantile(&times(|_| Ok(chase.read(nodes_per_walk)))?, 0.5))
    };
    Ok(Row {
        nodes: stats.nodes,
        pages: stats.pages,
        pages_per_node,
        nodes_per_walk,
        walk_p50_us: quantile(&walks, 0.5),
        walk_p99_us: quantile(&walks, 0.99),
        reads_p50_us: reads(WARM * nodes_per_walk, lines)?,
        cold_p50_us: quantile(&cold, 0.5),
        cold_reads_p50_us: reads(lines, lines)?,
        change_max_us,
    })
}

/// Returns the processor time of this thread, which excludes other load on the machine.
fn busy() -> Duration {
    let spent = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(spent.tv_sec.unsigned_abs(), spent.tv_nsec as u32)
}

/// Returns the page hashes of prompt `number`, which shares no page with other prompts.
fn prompt(number: usize) -> Vec<PageHash> {
    let page = |at: usize| {
        let mixed = ((number * PAGES + at) as u128 + 1)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        PageHash((mixed ^ (mixed >> 64)).to_le_bytes())
    };
    (0..PAGES).map(page).collect()
}

/// Calls `one` to warm up, then [`WALKS`] times. Returns the results of these [`WALKS`] calls, in
/// microseconds.
fn times(mut one: impl FnMut(usize) -> Result<f64, Failure>) -> Result<Vec<f64>, Failure> {
    let times: Vec<f64> = (0..WALKS + WALKS / 10).map(&mut one).collect::<Result<_, _>>()?;
    Ok(times[WALKS / 10..].to_vec())
}

/// Returns the microseconds of one walk, which must find all pages.
fn walk(table: &PageTable, pages: &[PageHash]) -> Result<f64, Failure> {
    let started = Instant::now();
    let spans = black_box(table.walk(black_box(&pages)));
    let took = micros(started);
    let found: usize = spans.iter().map(|span| span.pages).sum();
    if found == PAGES {
        return Ok(took);
    }
    Err(Failure::failed(format!("a walk found {found} of {PAGES} pages"), "report this"))
}

fn micros(started: Instant) -> f64 {
    started.elapsed().as_secs_f64() * 1e6
}

/// Cache lines in memory, each of which holds the position of the next, in an order that no
/// prefetcher predicts.
struct Chase {
    next: Vec<[u64; LINE / 8]>,
    at: usize,
}

impl Chase {
    /// Links `some` cache lines, evenly spaced among `all`, to one cycle.
    fn new(some: usize, all: usize) -> Self {
        let apart = all / some;
        let mut order: Vec<usize> = (0..some).map(|line| line * apart).collect();
        for at in (1..some).rev() {
            order.swap(at, (mix(at as u64) % (at as u64 + 1)) as usize);
        }
        let mut next = vec![[0; LINE / 8]; all];
        for (at, line) in order.iter().enumerate() {
            next[*line][0] = order[(at + 1) % some] as u64;
        }
        Self { next, at: order[0] }
    }

    /// Returns the microseconds of `count` reads, which follow the cycle from the last line read.
    fn read(&mut self, count: usize) -> f64 {
        let started = Instant::now();
        for _ in 0..count {
            self.at = self.next[self.at][0] as usize;
        }
        self.at = black_box(self.at);
        micros(started)
    }
}

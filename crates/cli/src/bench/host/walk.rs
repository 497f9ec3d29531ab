//! Prompts in a page table, and how long it takes to find one.

use super::super::report::quantile;
use super::report::Walk;
use crate::exit::Failure;
use ritornello_format::PageHash;
use ritornello_tiers::{PageTable, Phase, Tier};
use std::hint::black_box;
use std::time::Instant;

/// Pages of a prompt.
const PAGES: usize = 256;
/// Walks of each kind.
const WALKS: usize = 20_000;
/// Prompts that warm walks go round.
const WARM: usize = 4;
/// Pages of a node: every run of pages in another state than its neighbours,
/// and the worst there is, every page.
const NODES: [usize; 2] = [32, 1];

/// Measures tables of `nodes` nodes.
///
/// # Errors
/// If a walk does not find what is there.
pub fn measure(nodes: u64) -> Result<Vec<Walk>, Failure> {
    NODES.into_iter().map(|pages| table(nodes, pages)).collect()
}

fn table(nodes: u64, node_pages: usize) -> Result<Walk, Failure> {
    let table = PageTable::new();
    let prompts = (nodes as usize * node_pages / PAGES).max(WARM);
    for number in 0..prompts {
        let pages = prompt(number);
        for (at, from) in (0..PAGES).step_by(node_pages).enumerate() {
            // Neighbours differ, so they stay apart.
            let tier = if at % 2 == 0 { Tier::Host } else { Tier::Disk };
            let range = from..from + node_pages;
            for claimed in table.claim(tier, Phase::Storing, &pages, range) {
                table.settle(tier, &pages, claimed, &[]);
            }
        }
    }
    let stats = table.stats();
    let mut times = [Vec::with_capacity(WALKS), Vec::with_capacity(WALKS)];
    let warm: Vec<Vec<PageHash>> = (0..WARM).map(|number| prompt(number * 7 % prompts)).collect();
    for at in 0..WALKS + WALKS / 10 {
        let took = time(&table, &warm[at % WARM])?;
        // The first ones warm up.
        if at >= WALKS / 10 {
            times[0].push(took);
        }
    }
    for at in 0..WALKS {
        // A large odd step goes everywhere before it comes back.
        let pages = prompt(at.wrapping_mul(0x9e37_79b9_7f4a_7c15) % prompts);
        times[1].push(time(&table, &pages)?);
    }
    let [warm, cold] = times;
    Ok(Walk {
        nodes: stats.nodes,
        pages: stats.pages,
        node_pages,
        warm_p50_us: quantile(&warm, 0.5),
        warm_p99_us: quantile(&warm, 0.99),
        cold_p50_us: quantile(&cold, 0.5),
    })
}

/// The hashes of prompt `number`, which shares nothing with others.
fn prompt(number: usize) -> Vec<PageHash> {
    let page = |at: usize| {
        let mixed = ((number * PAGES + at) as u128 + 1)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        PageHash((mixed ^ (mixed >> 64)).to_le_bytes())
    };
    (0..PAGES).map(page).collect()
}

/// Microseconds of one walk, which must find everything.
fn time(table: &PageTable, pages: &[PageHash]) -> Result<f64, Failure> {
    let started = Instant::now();
    let spans = black_box(table.walk(black_box(&pages)));
    let took = started.elapsed().as_secs_f64() * 1e6;
    let found: usize = spans.iter().map(|span| span.pages).sum();
    if found == PAGES {
        return Ok(took);
    }
    Err(Failure::failed(format!("a walk found {found} of {PAGES} pages"), "report this"))
}

//! `ritornello bench store`: writes, reads, probes and restarts, compared with the raw limits of
//! the disk: the rates of direct I/O without a store.
//!
//! | module | contents |
//! |---|---|
//! | `args` | command-line arguments |
//! | `data` | writes and reads, compared with the raw disk |
//! | `capacity_gain` | pages kept by a store that is too small for all pages |
//! | `metadata` | probes, restart and memory, without payload |
//! | `metadata_store` | the store of `metadata` |
//! | `part` | the work of a separate process |
//! | `steady` | a full store, compared with fresh stores |
//! | `volumes` | a store over several directories |
//! | `report` | the figures |
//! | `show` | tables of the figures |

pub mod args;
mod capacity_gain;
mod data;
mod metadata;
mod metadata_store;
pub mod part;
mod report;
mod show;
mod steady;
mod volumes;

use super::disk;
use args::{Part, StoreArgs};
use clap::ValueEnum;
use report::Report;
use ritornello_codec::Codec;
use ritornello_store::SEGMENT_BYTES;
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::print::{json, print_stdout};
use ritornello_terminal::scratch::Scratch;
use ritornello_terminal::{Context, progress};
use std::time::Instant;

/// Measures and prints the report.
///
/// # Errors
/// If an argument is invalid, space is missing, a call fails, or wrong bytes are read.
pub fn run(context: &Context, args: &StoreArgs) -> Result<Status, Failure> {
    if args.steady {
        return steady::run(context, args);
    }
    if !args.paths.is_empty() {
        return volumes::run(context, args);
    }
    let started = Instant::now();
    let shape = args.shape()?;
    let segment_bytes = args.segment_bytes.unwrap_or(SEGMENT_BYTES);
    let (data, index) = (args.only != Some(Part::Index), args.only != Some(Part::Data));
    let data_needs = if data { data::needed(&shape, segment_bytes)? } else { 0 };
    let index_needs = if index { args.entries * metadata::DISK_BYTES_PER_PAGE } else { 0 };
    let dir = disk::choose(args.dir.as_deref(), data_needs.max(index_needs))?;
    let scratch = Scratch::new(&dir, "bench")?;
    let name = args.shape.to_possible_value();
    let mut report = Report {
        shape: name.map_or_else(String::new, |name| name.get_name().to_owned()),
        page_tokens: args.page_tokens,
        page_bytes: shape.page_bytes,
        call_pages: shape.sequence_pages,
        runs: args.runs,
        ..Report::default()
    };
    report.machine.dir = dir.display().to_string();
    let stores = if shape.codec == Codec::Raw { 1 } else { 2 };
    let data_steps = if data { 1 + stores * data::STEPS * u64::from(args.runs) } else { 0 };
    let index_steps = if index { metadata::STEPS } else { 0 };
    let steps = progress::steps(data_steps + index_steps);
    if data {
        data::measure(&shape, segment_bytes, args.runs, scratch.path(), &steps, &mut report)?;
    }
    if index {
        let python = args.python.clone().or_else(|| context.python.clone());
        let context = Context { python, ..context.clone() };
        metadata::measure(&context, args.entries, args.runs, scratch.path(), &steps, &mut report)?;
    }
    steps.finish_and_clear();
    drop(scratch);
    report.seconds = started.elapsed().as_secs_f64();
    if context.json {
        json(&report);
    } else {
        print_stdout(&show::tables(&report));
    }
    Ok(Status::Fine)
}

//! `ritornello bench`.

pub mod adaptive;
mod capacity_gain;
pub mod clients;
mod codec;
mod content;
mod data;
mod disk;
mod driver;
mod host;
pub mod index;
mod metadata;
mod metadata_store;
mod parts;
pub mod remote;
mod report;
mod shape;
mod show;
mod steady;
mod table;

use crate::args::{BenchArgs, BenchCommand, Part, StoreArgs};
use crate::exit::{Failure, Status};
use crate::print::{json, print_stdout};
use crate::scratch::Scratch;
use crate::{Context, progress};
use clap::ValueEnum;
use report::Report;
use ritornello_codec::Codec;
use ritornello_store::SEGMENT_BYTES;
use shape::Shape;
use std::time::Instant;

/// Runs a measurement.
///
/// # Errors
/// If space is missing, a call fails, or wrong bytes are read.
pub fn run(context: &Context, args: &BenchArgs) -> Result<Status, Failure> {
    match &args.what {
        BenchCommand::Part(part) => parts::run(&part.part),
        BenchCommand::Store(args) if args.steady => steady::run(context, args),
        BenchCommand::Store(args) => store(context, args),
        BenchCommand::Index(args) => index::run(context, args),
        BenchCommand::Adaptive(args) => adaptive::run(context, args),
        BenchCommand::Clients(args) => clients::run(context, args),
        BenchCommand::Host(args) => host::run(context, args),
        BenchCommand::Table(args) => table::run(context, args),
        BenchCommand::Codec(args) => codec::run(context, args),
        BenchCommand::Remote(args) => remote::run(context, args),
    }
}

fn store(context: &Context, args: &StoreArgs) -> Result<Status, Failure> {
    let started = Instant::now();
    let shape = Shape::from_args(args)?;
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
        let context =
            Context { json: context.json, python, self_command: context.self_command.clone() };
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

//! `ritornello bench`.

pub mod adaptive;
mod catalogue;
pub mod clients;
mod codec;
mod content;
pub mod contest;
mod data;
mod host;
mod index;
mod kept;
mod mover;
mod parts;
mod place;
pub mod remote;
mod report;
mod shape;
mod show;
mod steady;
mod table;

use crate::args::{BenchArgs, BenchCommand, Part, StoreArgs};
use crate::exit::{Failure, Status};
use crate::print::{json, say};
use crate::scratch::Scratch;
use crate::{Context, progress};
use clap::ValueEnum;
use report::Report;
use ritornello_codec::Codec;
use ritornello_store::SEGMENT_BYTES;
use shape::Shape;
use std::time::Instant;

/// Measures.
///
/// # Errors
/// Where there is no room, something fails, or wrong bytes come back.
pub fn run(context: &Context, args: &BenchArgs) -> Result<Status, Failure> {
    match &args.what {
        BenchCommand::Part(part) => parts::run(&part.part),
        BenchCommand::Store(args) if args.steady => steady::run(context, args),
        BenchCommand::Store(args) => store(context, args),
        BenchCommand::Index(args) => contest::run(context, args),
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
    let index_needs = if index { args.entries * index::NEEDED_A_PAGE } else { 0 };
    let dir = place::choose(args.dir.as_deref(), data_needs.max(index_needs))?;
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
    let index_steps = if index { index::STEPS } else { 0 };
    let steps = progress::steps(data_steps + index_steps);
    if data {
        data::measure(&shape, segment_bytes, args.runs, scratch.path(), &steps, &mut report)?;
    }
    if index {
        let python = args.python.clone().or_else(|| context.python.clone());
        let context = Context { json: context.json, python, again: context.again.clone() };
        index::measure(&context, args.entries, args.runs, scratch.path(), &steps, &mut report)?;
    }
    steps.finish_and_clear();
    drop(scratch);
    report.seconds = started.elapsed().as_secs_f64();
    if context.json {
        json(&report);
    } else {
        say(&show::tables(&report));
    }
    Ok(Status::Fine)
}

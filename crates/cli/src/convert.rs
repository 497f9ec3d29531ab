//! `ritornello convert-index`.

use crate::args::ConvertArgs;
use crate::exit::{Failure, Status};
use crate::print::{bytes, count, json, print_stdout};
use crate::{Context, open, progress};
use ritornello_store::{Conversion, parse_index};
use serde::Serialize;
use std::path::Path;

#[derive(Serialize)]
struct Answer<'a> {
    dir: &'a Path,
    #[serde(flatten)]
    conversion: &'a Conversion,
}

/// Converts the index of a store.
///
/// # Errors
/// If no store exists, a process owns it, or the index is not compiled in.
pub fn run(context: &Context, args: &ConvertArgs) -> Result<Status, Failure> {
    let (to, memory) = parse_index(&args.to).map_err(|error| Failure::unopened(&error))?;
    if open::manifest(&args.dir)?.is_none() {
        return Err(Failure::unusable(
            format!("there is no Ritornello store in {}", args.dir.display()),
            "name the directory that was given to Store.open",
        ));
    }
    let bar = progress::steps(0);
    bar.set_message("runs copied");
    let conversion = ritornello_node::convert_index(&args.dir, to, memory, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let conversion = conversion.map_err(|error| Failure::unopened(&error))?;
    if context.json {
        json(&Answer { dir: &args.dir, conversion: &conversion });
    } else {
        print_stdout(&describe(args, &conversion));
    }
    Ok(if conversion.runs_dropped == 0 { Status::Fine } else { Status::Problems })
}

fn describe(args: &ConvertArgs, c: &Conversion) -> String {
    let dir = args.dir.display();
    if c.from == c.to {
        return format!("the index of {dir} is `{}` already", c.to);
    }
    let mut text = format!(
        "the index of {dir} is `{}` now, and was `{}`: {} runs, {} pages, {} on disk (before: {}), in \
         {:.1} s",
        c.to,
        c.from,
        count(c.runs),
        count(c.pages),
        bytes(c.disk_bytes),
        bytes(c.disk_bytes_before),
        c.seconds
    );
    if c.runs_dropped > 0 {
        text += &format!("\n{} runs were inconsistent and are dropped", count(c.runs_dropped));
    }
    text
}

//! `ritornello remote`: statistics, verification and garbage collection of a remote.

use clap::{Args, Subcommand};
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::print::{bytes, count, json, print_stdout, table};
use ritornello_terminal::value::size;
use ritornello_terminal::{Context, open, progress};
use ritornello_tiers::remote::{CollectOptions, Form, Inventory, RemoteAddress, collect, fsck};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Maximum number of findings in text output; `--json` lists all.
const FINDINGS_SHOWN: usize = 20;

/// Arguments of `remote`.
#[derive(Debug, Args)]
#[command(after_help = "\
An ADDRESS is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIR; for
another S3 server s3://BUCKET/PREFIX?endpoint=http://HOST:PORT. ?key=/FILE names the key file of
sealed objects. Under `python -m ritornello` an ADDRESS may also be MODULE:CLASS.

Examples:
  ritornello remote stat s3://bucket/kv
  ritornello remote gc s3://bucket/kv --max-age 30d --budget 10TiB --dry-run")]
pub struct RemoteArgs {
    /// The operation.
    #[command(subcommand)]
    pub what: RemoteCommand,
}

/// Operations on a remote.
#[derive(Debug, Subcommand)]
pub enum RemoteCommand {
    /// Count objects, pages and bytes
    Stat(StatArgs),
    /// Read and verify every object
    Fsck(FsckArgs),
    /// Remove objects by age or down to a budget, while engines use the remote
    Gc(GcArgs),
}

/// Arguments of `remote stat`.
#[derive(Debug, Args)]
#[command(after_help = "\
Lists the remote, and reads no object. A page that is in two objects, because its prompt was
continued, counts twice.

Examples:
  ritornello remote stat s3://bucket/kv --json | jq .bytes")]
pub struct StatArgs {
    /// The remote's address
    pub address: RemoteAddress,
}

/// Arguments of `remote fsck`.
#[derive(Debug, Args)]
#[command(after_help = "\
Reads all objects. Damaged pages are never delivered, with or without --repair. After --repair has
removed an object, an engine that has its pages writes them again when it next puts the same prompt
or a continuation of it.
With ?key=/FILE seals are verified; a wrong seal counts as damage. Exit code 1: an object was
damaged or could not be read.

Examples:
  ritornello remote fsck s3://bucket/kv
  ritornello remote fsck s3://bucket/kv --repair")]
pub struct FsckArgs {
    /// The remote's address
    pub address: RemoteAddress,
    /// Remove damaged objects
    #[arg(long)]
    pub repair: bool,
}

/// Arguments of `remote gc`.
#[derive(Debug, Args)]
#[command(after_help = "\
An object is as old as the youngest object that continues its prompt: ends of prompts are removed
before beginnings, and objects whose predecessor is missing are removed first. Ages are by the
remote's clock. If all objects were written within --max-age and fit --budget together, they are
only listed; otherwise the headers of all objects are read.

The command may run while engines or another gc run: a removed object costs hits, and is written
again when its pages are computed again. Objects younger than --grace are kept.

Examples:
  ritornello remote gc s3://bucket/kv --max-age 30d
  ritornello remote gc s3://bucket/kv --budget 10TiB --dry-run --json")]
pub struct GcArgs {
    /// The remote's address
    pub address: RemoteAddress,
    /// Remove objects whose last write or continuation is longer ago than this: 30d, 12h, 45m, 90s
    #[arg(long, value_parser = age, required_unless_present = "budget")]
    pub max_age: Option<Duration>,
    /// Remove the oldest objects until at most this number of bytes is left
    #[arg(long, value_parser = size)]
    pub budget: Option<u64>,
    /// Keep all objects younger than this age, written as for --max-age
    #[arg(long, default_value = "1h", value_parser = age)]
    pub grace: Duration,
    /// Remove nothing, and print what would be removed
    #[arg(long)]
    pub dry_run: bool,
}

fn age(text: &str) -> Result<Duration, String> {
    let unit = text.chars().last().and_then(|unit| match unit {
        's' => Some(1),
        'm' => Some(60),
        'h' => Some(3600),
        'd' => Some(86_400),
        _ => None,
    });
    let number =
        text.get(..text.len().saturating_sub(1)).and_then(|number| number.parse::<u64>().ok());
    let seconds = unit.zip(number).and_then(|(unit, number)| number.checked_mul(unit));
    seconds
        .map(Duration::from_secs)
        .ok_or_else(|| "expected a number followed by s, m, h or d, such as 30d".to_owned())
}

/// Runs the operation.
///
/// # Errors
/// If the remote cannot be opened, listed or read, or `gc` cannot write to it.
pub fn run(context: &Context, args: &RemoteArgs) -> Result<Status, Failure> {
    match &args.what {
        RemoteCommand::Stat(args) => stat(context, args),
        RemoteCommand::Fsck(args) => check(context, args),
        RemoteCommand::Gc(args) => gc(context, args),
    }
}

#[derive(Serialize)]
struct StatReport<'a> {
    address: &'a RemoteAddress,
    objects: usize,
    /// Number of objects whose names say that they are sealed.
    sealed_objects: u64,
    pages: u64,
    bytes: u64,
    scopes: usize,
    /// Write time of the oldest object, in seconds since 1970 by the remote's clock.
    oldest: Option<u64>,
    youngest: Option<u64>,
    /// Number and bytes of objects of other format versions, by version.
    other_versions: &'a BTreeMap<String, (u64, u64)>,
    /// The first 1,000 names that belong to no version of the format; `strange_names` is the number
    /// of all such names.
    strange: &'a [String],
    strange_names: u64,
}

fn stat(context: &Context, args: &StatArgs) -> Result<Status, Failure> {
    let remote = open::remote(&args.address)?;
    let inventory = Inventory::take(remote.backend.as_ref()).map_err(Failure::from_remote)?;
    let written = || inventory.objects.iter().map(|object| object.written);
    let answer = StatReport {
        address: &args.address,
        objects: inventory.objects.len(),
        sealed_objects: inventory.objects_of(Form::Sealed),
        pages: inventory.pages(),
        bytes: inventory.bytes(),
        scopes: inventory.scopes(),
        oldest: written().min(),
        youngest: written().max(),
        other_versions: &inventory.others,
        strange: &inventory.unrecognized,
        strange_names: inventory.unrecognized_names,
    };
    if context.json {
        json(&answer);
        return Ok(Status::Fine);
    }
    let mut lines = vec![format!(
        "{} objects with {} pages in all, in {} scopes: {}",
        count(answer.objects as u64),
        count(answer.pages),
        count(answer.scopes as u64),
        bytes(answer.bytes)
    )];
    if let (Some(oldest), Some(youngest)) = (answer.oldest, answer.youngest) {
        lines
            .push(format!("{} hours between the first and last write", (youngest - oldest) / 3600));
    }
    let unread = match remote.options.form() {
        Form::Sealed => inventory.objects_of(Form::Plain),
        Form::Plain => answer.sealed_objects,
    };
    if unread > 0 {
        lines.push(match remote.options.form() {
            Form::Sealed => {
                format!(
                    "{} objects have no seal: engines with a key do not read them",
                    count(unread)
                )
            }
            Form::Plain => {
                format!(
                    "{} objects are sealed: engines without ?key= do not read them",
                    count(unread)
                )
            }
        });
    }
    for (version, (objects, size)) in &inventory.others {
        lines.push(format!(
            "{} objects ({}) under ritornello/{version}/ are of another format, which this \
             Ritornello neither reads nor removes",
            count(*objects),
            bytes(*size)
        ));
    }
    if let Some(first) = inventory.unrecognized.first() {
        lines.push(format!(
            "{} names that belong to no version of the format, such as {first}",
            count(inventory.unrecognized_names)
        ));
    }
    print_stdout(&lines.join("\n"));
    Ok(Status::Fine)
}

#[derive(Serialize)]
struct FsckReport<'a> {
    address: &'a RemoteAddress,
    clean: bool,
    objects: u64,
    pages: u64,
    bytes: u64,
    damaged: &'a [(String, String)],
    removed: u64,
    /// Names of sealed objects whose key is not in the key file, each with the reason.
    unknown_key: &'a [(String, String)],
    /// Names of objects that could not be read, each with the error.
    unreadable: &'a [(String, String)],
    /// Number of objects of which only the checksums were verified, not the seals.
    unauthenticated: u64,
    gone: u64,
}

fn check(context: &Context, args: &FsckArgs) -> Result<Status, Failure> {
    let remote = open::remote(&args.address)?;
    let (backend, keys) = (remote.backend.as_ref(), remote.options.keys.as_deref());
    let inventory = Inventory::take(backend).map_err(Failure::from_remote)?;
    let bar = progress::bar("verifying");
    bar.set_length(inventory.bytes());
    let found = fsck(backend, &inventory, keys, args.repair, &mut |object| bar.inc(object.bytes));
    bar.finish_and_clear();
    let found = found.map_err(Failure::from_remote)?;
    let clean = found.damaged.is_empty() && found.unreadable.is_empty();
    if context.json {
        json(&FsckReport {
            address: &args.address,
            clean,
            objects: found.objects,
            pages: found.pages,
            bytes: found.bytes,
            damaged: &found.damaged,
            removed: found.removed,
            unknown_key: &found.unknown_key,
            unreadable: &found.unreadable,
            unauthenticated: found.unauthenticated,
            gone: found.gone,
        });
        return Ok(if clean { Status::Fine } else { Status::Problems });
    }
    let mut lines = vec![format!(
        "{} pages of {} objects read ({})",
        count(found.pages),
        count(found.objects),
        bytes(found.bytes)
    )];
    if !found.damaged.is_empty() {
        let mut damaged = table(&["object", "what is wrong"]);
        for (name, wrong) in found.damaged.iter().take(FINDINGS_SHOWN) {
            damaged.add_row([name, wrong]);
        }
        lines.push(damaged.to_string());
        if found.damaged.len() > FINDINGS_SHOWN {
            lines.push(format!(
                "and {} more: --json lists them",
                found.damaged.len() - FINDINGS_SHOWN
            ));
        }
    }
    if found.unauthenticated > 0 {
        let why = match keys {
            Some(_) => "they have no seal",
            None => "add ?key=/FILE to the address to verify seals",
        };
        lines.push(format!(
            "of {} objects only the checksums were verified: {why}",
            count(found.unauthenticated)
        ));
    }
    if let Some((name, why)) = found.unreadable.first() {
        lines.push(format!(
            "{} objects could not be read, such as {name}: {why}",
            count(found.unreadable.len() as u64)
        ));
    }
    if let Some((name, why)) = found.unknown_key.first() {
        lines.push(format!(
            "{} objects were not verified, such as {name}: {why}; they stay until `gc` removes them",
            count(found.unknown_key.len() as u64)
        ));
    }
    lines.push(match (clean, args.repair) {
        (true, _) => "clean".to_owned(),
        (false, true) => format!("not clean; {} objects removed", count(found.removed)),
        (false, false) => {
            "not clean; damaged pages are never delivered. --repair removes damaged objects"
                .to_owned()
        }
    });
    print_stdout(&lines.join("\n"));
    Ok(if clean { Status::Fine } else { Status::Problems })
}

#[derive(Serialize)]
struct GcReport<'a> {
    address: &'a RemoteAddress,
    dry_run: bool,
    objects: u64,
    bytes: u64,
    removed_objects: u64,
    removed_bytes: u64,
    orphans: u64,
    failed: u64,
    /// Number of objects whose header could not be read.
    unreadable: u64,
}

fn gc(context: &Context, args: &GcArgs) -> Result<Status, Failure> {
    let remote = open::remote(&args.address)?;
    let (backend, keys) = (remote.backend.as_ref(), remote.options.keys.as_deref());
    let options = CollectOptions {
        max_age: args.max_age,
        budget: args.budget,
        grace: args.grace,
        dry_run: args.dry_run,
    };
    let bar = progress::bar("removing");
    let done = collect(backend, &options, keys, &mut |object| bar.inc(object.bytes));
    bar.finish_and_clear();
    let done = done.map_err(Failure::from_remote)?;
    if context.json {
        json(&GcReport {
            address: &args.address,
            dry_run: args.dry_run,
            objects: done.objects,
            bytes: done.bytes,
            removed_objects: done.removed_objects,
            removed_bytes: done.removed_bytes,
            orphans: done.orphans,
            failed: done.failed,
            unreadable: done.unreadable,
        });
    } else {
        let removed = if args.dry_run { "would be removed" } else { "removed" };
        print_stdout(&format!(
            "{} of {} objects {removed} ({} of {}), {} of which followed a missing object",
            count(done.removed_objects),
            count(done.objects),
            bytes(done.removed_bytes),
            bytes(done.bytes),
            count(done.orphans)
        ));
        if done.failed > 0 {
            print_stdout(&format!(
                "{} objects or unfinished files could not be removed",
                count(done.failed)
            ));
        }
        if done.unreadable > 0 {
            print_stdout(&format!(
                "{} objects could not be read: each counts as the beginning of a prompt",
                count(done.unreadable)
            ));
        }
    }
    Ok(if done.failed == 0 { Status::Fine } else { Status::Problems })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_parse_number_and_unit() {
        assert_eq!(age("30d"), Ok(Duration::from_secs(30 * 86_400)));
        assert_eq!(age("0s"), Ok(Duration::ZERO));
        for wrong in ["", "d", "30", "3x", "-1d", "99999999999999999999d", "ä"] {
            assert!(age(wrong).is_err(), "{wrong}");
        }
    }
}

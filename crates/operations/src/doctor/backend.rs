//! `ritornello doctor --backend`: conformance checks of a remote's backend.

use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::print::{json, print_stdout, table};
use ritornello_terminal::{Context, open, progress};
use ritornello_tiers::remote::{Check, Inventory, RemoteAddress, check_backend};
use serde::Serialize;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

#[derive(Serialize)]
struct Answer<'a> {
    backend: &'a RemoteAddress,
    healthy: bool,
    checks: Vec<Row<'a>>,
    advice: &'a [String],
}

#[derive(Serialize)]
struct Row<'a> {
    what: &'a str,
    wrong: Option<&'a str>,
}

/// Checks a backend with objects whose names begin with `ritornello-doctor/`. Removes them
/// afterwards, if the backend can list and delete.
///
/// # Errors
/// If the remote cannot be opened.
pub fn run(
    context: &Context,
    address: &RemoteAddress,
    timeout: Duration,
) -> Result<Status, Failure> {
    let backend = open::remote(address)?.backend;
    let bar = progress::steps(1);
    bar.set_message("checking the backend");
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let checks = check_backend(&backend, &format!("ritornello-doctor/{nanos}/"), timeout);
    bar.finish_and_clear();
    let healthy = checks.iter().all(|check| check.failure.is_none());
    let advice = if healthy { advice(Inventory::take(backend.as_ref())) } else { Vec::new() };
    if context.json {
        let checks =
            checks.iter().map(|c| Row { what: c.what, wrong: c.failure.as_deref() }).collect();
        json(&Answer { backend: address, healthy, checks, advice: &advice });
    } else {
        print_stdout(&describe(healthy, &checks, &advice));
    }
    Ok(if healthy { Status::Fine } else { Status::Problems })
}

fn advice(inventory: ritornello_format::Result<Inventory>) -> Vec<String> {
    let Ok(inventory) = inventory else {
        return vec![
            "the backend's objects cannot be listed: `ritornello remote stat`, `remote fsck` and \
             `remote gc` need the list"
                .to_owned(),
        ];
    };
    let other = |(version, (objects, _)): (&String, &(u64, u64))| {
        format!("{objects} objects are of format {version}, which this Ritornello does not read")
    };
    inventory.others.iter().map(other).collect()
}

fn describe(healthy: bool, checks: &[Check], advice: &[String]) -> String {
    let mut out = table(&["", "what"]);
    for check in checks {
        match &check.failure {
            None => out.add_row(["ok", check.what]),
            Some(_) => out.add_row(["WRONG", check.what]),
        };
    }
    for advice in advice {
        out.add_row(["advice", advice]);
    }
    // Errors are printed below the table, whose columns they would widen.
    let wrong =
        checks.iter().filter_map(|c| Some(format!("{}: {}\n", c.what, c.failure.as_ref()?)));
    let verdict = if healthy { "nothing is wrong" } else { "something is wrong: see above" };
    format!("{out}\n{}{verdict}", wrong.collect::<String>())
}

//! Metrics of stores, in the text format of OpenMetrics.
//!
//! All metrics have one scheme: names begin with `ritornello_`, units are base units, and each
//! series, except of `ritornello_build_info`, has the label `store`. The number of a store's series
//! is bounded: names are fixed, at most [`SCOPES_MAX`](crate::limits::SCOPES_MAX) scopes have
//! series (all further scopes are one, `other`), and so have at most 256 directories. A value that
//! is unknown, for example because no process owns the store, has no series.

mod families;
mod names;
mod owned;
mod scope_labels;
mod unowned;

use crate::answer::Named;
use crate::problem::Problem;
use axum::http::StatusCode;
use families::{Families, Rows};
use ritornello_node::Observed;

/// The media type of the metrics text.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Returns the metrics of stores.
///
/// # Errors
/// 500 if the text cannot be encoded.
pub(crate) fn encode(observed: &[Named]) -> Result<String, Problem> {
    let mut families = Families::default();
    families.rows(Vec::new()).gauge(
        &names::BUILD_INFO,
        [("version", env!("CARGO_PKG_VERSION").to_owned())],
        1_u64,
    );
    for named in observed {
        let mut rows = families.rows(vec![("store", families::label(&named.store))]);
        add(&mut rows, named);
    }
    families.encode().map_err(|error| {
        Problem::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "fatal",
            format!("the metrics cannot be encoded: report this ({error})"),
        )
    })
}

fn add(rows: &mut Rows<'_>, named: &Named) {
    let observation = &named.observation;
    let (is_up, is_owned) = match &observation.observed {
        Ok(Observed::Owned(_)) => (true, true),
        Ok(Observed::Unowned(_)) => (true, false),
        Err(_) => (false, false),
    };
    rows.gauge(&names::UP, [], u64::from(is_up));
    rows.gauge(&names::OWNED, [], u64::from(is_owned));
    rows.gauge(&names::OBSERVATION, [], observation.took.as_secs_f64());
    match &observation.observed {
        Ok(Observed::Owned(stats)) => {
            owned::add(rows, stats);
            for (dir, written) in &observation.drives {
                let labels = [("volume", families::label(dir))];
                rows.counter(&names::VOLUME_DRIVE_WRITTEN, labels, *written);
            }
        }
        Ok(Observed::Unowned(stored)) => unowned::add(rows, stored),
        Err(_) => {}
    }
}

#[cfg(test)]
mod tests;

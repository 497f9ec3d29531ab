//! Decisions about the pages of requests, from Python's arguments.

use crate::arguments::{Keys, duration};
use crate::error::{OrRaise, invalid};
use crate::scope::Scope;
use pyo3::prelude::*;
use ritornello_format::check_keys;
use ritornello_store::{DECISION_KEYS_MAX, Decision, DecisionEstimate, DecisionOutcome};

/// Returns a decision about `keys`, made now. `estimate`: seconds with a load, and without.
pub(crate) fn decision(
    request: &str,
    scope: &Scope,
    keys: &Bound<'_, PyAny>,
    outcome: &str,
    estimate: Option<(f64, f64)>,
) -> PyResult<Decision> {
    let py = keys.py();
    let outcome = DecisionOutcome::parse(outcome).ok_or_else(|| {
        let words = DecisionOutcome::ALL.map(DecisionOutcome::word).join(", ");
        invalid(py, format!("outcome must be one of {words}, not {outcome:?}"))
    })?;
    let micros = |seconds: f64| -> PyResult<u64> {
        let micros = duration(py, "estimate", seconds)?.as_micros();
        Ok(u64::try_from(micros).unwrap_or(u64::MAX))
    };
    let estimate = match estimate {
        None => None,
        Some((with, without)) => Some(DecisionEstimate {
            with_load_micros: micros(with)?,
            without_load_micros: micros(without)?,
        }),
    };
    let held = Keys::of(keys)?;
    let keys = held.slices();
    check_keys(&keys[..keys.len().min(DECISION_KEYS_MAX)]).or_raise(py)?;
    let made = Decision::now(request, scope.inner.id(), outcome).with_pages(&keys);
    Ok(Decision { estimate, ..made })
}

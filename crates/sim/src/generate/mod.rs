//! Generators of workloads from a few parameters and a seed.

mod multi_round_qa;
mod random;
mod ten_stage;

pub use multi_round_qa::MultiRoundQa;
pub use ten_stage::{EXPECTED_HIT_RATES, TenStage};

use ritornello_format::{Error, Result};

/// Checks an option.
///
/// # Errors
/// `Invalid` unless `holds`, with the option's name, and with `wanted`, the condition, as message.
fn check(holds: bool, option: &'static str, wanted: &'static str) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::invalid(wanted).with("option", option)) }
}

//! The version of the format, and the refusal of files that this build cannot read.

use crate::{Error, Result};

/// The version of a store's files. `docs/format.md` says which additions a version permits, and
/// which changes increase it.
pub const FORMAT_VERSION: u32 = 1;

/// The features that this build knows, one bit each: changes within a version that a reader must
/// not ignore. This build knows no feature.
const FEATURES: u32 = 0;

/// Checks that this build reads a file with this version and these features. `what` names the kind
/// of file. The caller has verified the bytes that hold both numbers.
///
/// # Errors
/// `Invalid`, with the remedy, if the version differs (the message names both versions), or a
/// feature is unknown.
pub(crate) fn check_version(what: &str, version: u32, features: u32) -> Result<()> {
    if version != FORMAT_VERSION {
        let remedy = if version > FORMAT_VERSION {
            "use a newer Ritornello, or name a new directory"
        } else {
            "no program converts a format from before the first release; use the build that wrote \
             it, or name a new directory, where the pages are computed again"
        };
        return Err(Error::invalid(format!(
            "this {what} is of format {version}, and this Ritornello reads format \
             {FORMAT_VERSION}: {remedy}"
        )));
    }
    let unknown = features & !FEATURES;
    if unknown != 0 {
        return Err(Error::invalid(format!(
            "this {what} uses features ({unknown:#x}) of format {version} that this Ritornello \
             does not know: use a newer Ritornello, or name a new directory"
        )));
    }
    Ok(())
}

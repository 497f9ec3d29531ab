//! Parsers of argument values.

use ritornello_codec::Codec;
use ritornello_format::parse_bytes;
use std::path::PathBuf;

/// Parses the name of a codec.
///
/// # Errors
/// If no codec has this name; the error lists the names.
pub fn codec(word: &str) -> Result<Codec, String> {
    ritornello_store::parse_codec(word).map_err(|error| error.to_string())
}

/// Parses the path of a chart.
///
/// # Errors
/// If the path does not end in `.svg`.
pub fn picture(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("svg")) {
        return Ok(path);
    }
    Err("charts are drawn as SVG: name a file that ends in .svg".to_owned())
}

/// Parses a size in bytes.
///
/// # Errors
/// If `text` is not a size; the error says how a size is written.
pub fn size(text: &str) -> Result<u64, String> {
    parse_bytes(text).map_err(|error| error.to_string())
}

//! Keys of pages in requests.

use crate::limits::KEYS_MAX;
use crate::problem::Problem;
use ritornello_format::parse_key;
use serde::Deserialize;
use utoipa::ToSchema;

/// A key: 8 to 64 bytes, in hexadecimal digits.
#[derive(Deserialize, ToSchema)]
#[schema(pattern = "^([0-9a-fA-F]{2}){8,64}$")]
pub(super) struct HexKey(String);

/// Converts the keys of a request. Does not check their lengths.
///
/// # Errors
/// 400 for more than [`KEYS_MAX`] keys, or a key that is not an even number of hexadecimal digits.
pub(super) fn parse(keys: &[HexKey]) -> Result<Vec<Vec<u8>>, Problem> {
    if keys.len() > KEYS_MAX {
        return Err(Problem::invalid(format!(
            "too many keys: send at most {KEYS_MAX} in a request"
        )));
    }
    let parsed: Option<Vec<Vec<u8>>> = keys.iter().map(|key| parse_key(&key.0)).collect();
    parsed.ok_or_else(|| {
        Problem::invalid("a key must be 16 to 128 hexadecimal digits, an even number of them")
    })
}

//! Parses sizes that a user writes, such as `200GiB`.

use crate::{Error, Result};

/// The suffixes of a size, and the bytes that each stands for.
const UNITS: [(&str, u64); 10] = [
    ("", 1),
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

/// Parses a number of bytes: `200GiB`, `1.5 TB`, `1048576`. `KiB`, `MiB`, `GiB` and `TiB` are
/// powers of 1024, `KB` to `TB` powers of 1000; case does not matter. A fraction of a byte is
/// dropped.
///
/// # Errors
/// `Invalid`, with the accepted form.
pub fn parse_bytes(text: &str) -> Result<u64> {
    let refused = |why: String| Error::invalid(why).with("given", format!("{text:?}"));
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = (&trimmed[..digits], trimmed[digits..].trim());
    let known = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit));
    let Some(&(_, scale)) = known else {
        return Err(match unit.to_ascii_uppercase().as_str() {
            letter @ ("K" | "M" | "G" | "T") => refused(format!(
                "write {number}{letter}iB (powers of 1024) or {number}{letter}B (powers of 1000)"
            )),
            _ => refused("a size is a number and a unit, such as 200GiB".to_owned()),
        });
    };
    let bytes = if number.contains('.') {
        let value: Option<f64> = number.parse().ok();
        value.map(|value| value * scale as f64).filter(|b| *b < u64::MAX as f64).map(|b| b as u64)
    } else {
        number.parse().ok().and_then(|value: u64| value.checked_mul(scale))
    };
    bytes.ok_or_else(|| {
        refused("a size is a number with a unit, such as 200GiB, below 2^64 bytes".to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_with_and_without_units() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("200GiB", 200 << 30),
            (" 1.5 gib ", 3 << 29),
            ("2TB", 2_000_000_000_000),
            ("7 B", 7),
        ] {
            assert_eq!(parse_bytes(text).unwrap(), bytes, "{text}");
        }
    }

    #[test]
    fn ambiguous_and_malformed_sizes_are_refused_with_advice() {
        let error = parse_bytes("200G").unwrap_err().to_string();
        assert!(error.contains("200GiB") && error.contains("200GB"), "{error}");
        for text in ["", "GiB", "-1GiB", "1.2.3GiB", "1PiB", "99999999TiB", "1e9", "ten"] {
            let error = parse_bytes(text).unwrap_err().to_string();
            assert!(error.contains("200GiB"), "{text}: {error}");
        }
    }
}

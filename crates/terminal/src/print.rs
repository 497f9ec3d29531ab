//! Standard output, and formats of numbers.

use comfy_table::{ContentArrangement, Table, TableComponent, presets};
use serde::Serialize;
use std::io::Write;

/// Writes `text` and a newline to standard output. Ignores errors, such as a closed pipe.
pub fn print_stdout(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// Writes a line to standard error.
pub fn print_stderr(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Writes `value` to standard output, as indented JSON.
pub fn json(value: &impl Serialize) {
    match serde_json::to_string_pretty(value) {
        Ok(text) => print_stdout(&text),
        Err(error) => {
            print_stderr(&format!("error: the result cannot be written as JSON: {error}"))
        }
    }
}

/// Returns an empty table with this header.
#[must_use]
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
    table.remove_style(TableComponent::HorizontalLines);
    table.remove_style(TableComponent::MiddleIntersections);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    if !header.is_empty() {
        table.set_header(header);
    }
    table
}

/// Formats a number of bytes: `1.5 GiB`.
#[must_use]
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut value = count as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = usize::from(value < 100.0 && value.fract() != 0.0);
    format!("{value:.digits$} {}", UNITS[unit])
}

/// Formats a number with separators: `1,000,000`.
#[must_use]
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Formats a fraction as a percentage: `12.3 %` for 0.123.
#[must_use]
pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_formatted_for_reading() {
        assert_eq!(bytes(17), "17 B");
        assert_eq!(bytes(192 << 10), "192 KiB");
        assert_eq!(bytes(3 << 29), "1.5 GiB");
        assert_eq!(bytes(u64::MAX), "16384 PiB");
        assert_eq!((count(7), count(1_000_000)), ("7".into(), "1,000,000".into()));
    }
}

//! Reads traces from files: one JSON object per line, gzip or plain.

use crate::{Trace, TraceBuilder};
use flate2::read::MultiGzDecoder;
use ritornello_format::{Error, Result};
use serde::Deserialize;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// How malformed lines are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum BadLines {
    /// The first malformed line is an error.
    #[default]
    Fatal,
    /// Malformed lines are skipped, and listed in [`Trace::skipped`].
    Skip,
}

/// A line of the file. Fields not listed here are ignored.
#[derive(Debug, Deserialize)]
struct Line {
    /// Milliseconds since an arbitrary start.
    timestamp: f64,
    #[serde(rename = "input_length")]
    _input_length: u64,
    #[serde(rename = "output_length")]
    _output_length: u64,
    hash_ids: Vec<u64>,
}

/// Reads a trace: JSON lines with `timestamp` (milliseconds, not negative), `input_length`,
/// `output_length` (tokens) and `hash_ids` (one number for each block of the prompt, in order).
/// Requests keep the order of the lines, regardless of their times. Empty lines are ignored, but
/// line numbers count them. `progress` receives the number of bytes of the file read so far.
///
/// # Errors
/// `Invalid` if a line is malformed and `bad_lines` is [`BadLines::Fatal`] (with the line's number,
/// starting at 1), if a read fails after the beginning (as in damaged gzip data), or if the trace
/// has no blocks; `Retry` if the file cannot be opened or its beginning cannot be read.
pub fn read(path: &Path, bad_lines: BadLines, progress: &mut dyn FnMut(u64)) -> Result<Trace> {
    let with_file = |error: Error| error.with("file", path.display());
    let unreadable = |error| with_file(Error::retry("the trace cannot be read").because(error));
    let file = File::open(path).map_err(unreadable)?;
    let mut file = BufReader::with_capacity(1 << 20, ProgressReader { file, read: 0, progress });
    let gzip = file.fill_buf().map_err(unreadable)?.starts_with(&[0x1f, 0x8b]);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.trim_end_matches(".gz").trim_end_matches(".jsonl");
    let trace = if gzip {
        lines(name, BufReader::with_capacity(1 << 20, MultiGzDecoder::new(file)), bad_lines)
    } else {
        lines(name, file, bad_lines)
    };
    trace.map_err(with_file)
}

fn lines(name: &str, mut source: impl BufRead, bad_lines: BadLines) -> Result<Trace> {
    let mut builder = TraceBuilder::new(name);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let length = source.read_until(b'\n', &mut line);
        let length = length.map_err(|error| {
            Error::invalid("the trace cannot be read to its end: check the file")
                .with("line", number)
                .because(error)
        })?;
        if length == 0 {
            break;
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        match request(&line) {
            Ok(request) => builder.request(request.timestamp, request.hash_ids),
            Err(_) if bad_lines == BadLines::Skip => builder.skip(number),
            Err(reason) => {
                let line = format!("line {number} of the trace is malformed: {reason}");
                return Err(Error::invalid(line + "; --skip-broken skips malformed lines"));
            }
        }
    }
    let trace = builder.finish();
    if trace.references() == 0 {
        return Err(Error::invalid("the trace has no blocks: name a trace with hash_ids")
            .with("requests", trace.requests())
            .with("skipped_lines", trace.skipped().len()));
    }
    Ok(trace)
}

fn request(line: &[u8]) -> std::result::Result<Line, String> {
    let request: Line = serde_json::from_slice(line).map_err(|error| error.to_string())?;
    if request.timestamp < 0.0 {
        return Err(format!("timestamp {} is negative", request.timestamp));
    }
    Ok(request)
}

/// A file that reports how many bytes were read.
struct ProgressReader<'a> {
    file: File,
    read: u64,
    progress: &'a mut dyn FnMut(u64),
}

impl Read for ProgressReader<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let count = self.file.read(into)?;
        self.read += count as u64;
        (self.progress)(self.read);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const GOOD: &str =
        r#"{"timestamp": 0, "input_length": 900, "output_length": 5, "hash_ids": [1, 2]}"#;

    fn given(text: &[u8], bad_lines: BadLines) -> Result<Trace> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text).unwrap();
        let mut seen = 0;
        let trace = read(file.path(), bad_lines, &mut |bytes| seen = bytes);
        assert!(trace.is_err() || seen == text.len() as u64);
        trace
    }

    #[test]
    fn plain_and_gzip_traces_agree() {
        let text = format!("{GOOD}\n\n{}\r\n{GOOD}", GOOD.replace("[1, 2]", "[]"));
        let plain = given(text.as_bytes(), BadLines::Fatal).unwrap();
        assert_eq!((plain.requests(), plain.references(), plain.footprint()), (3, 4, 2));
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(text.as_bytes()).unwrap();
        let bytes = gzip.finish().unwrap();
        let packed = given(&bytes, BadLines::Fatal).unwrap();
        assert_eq!(packed.blocks(), plain.blocks());
        let cut = given(&bytes[..bytes.len() - 12], BadLines::Skip).unwrap_err();
        assert!(cut.to_string().contains("cannot be read to its end"), "{cut}");
    }

    #[test]
    fn bad_lines_are_named_or_skipped() {
        for bad in [
            "not json",
            r#"{"timestamp": 0, "input_length": 900, "hash_ids": [1]}"#,
            r#"{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [-1]}"#,
            r#"{"timestamp": -1, "input_length": 9, "output_length": 5, "hash_ids": [1]}"#,
            r#"{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [1"#,
            "\u{0}",
            "[]",
        ] {
            let text = format!("{GOOD}\n{GOOD}\n{bad}\n{GOOD}\n");
            let error = given(text.as_bytes(), BadLines::Fatal).unwrap_err().to_string();
            assert!(error.contains("line 3 "), "{error}");
            let trace = given(text.as_bytes(), BadLines::Skip).unwrap();
            assert_eq!((trace.requests(), trace.skipped()), (3, &[3][..]), "{bad}");
        }
    }

    #[test]
    fn trace_without_blocks_is_an_error() {
        for text in ["", "\n\n", &GOOD.replace("[1, 2]", "[]")] {
            let error = given(text.as_bytes(), BadLines::Skip).unwrap_err().to_string();
            assert!(error.contains("no blocks"), "{error}");
        }
        assert!(read(Path::new("/nowhere/at/all"), BadLines::Skip, &mut |_| {}).is_err());
    }
}

//! Tables of the report of `bench store`, with the targets next to the figures.

use super::report::{Moved, Report};
use ritornello_terminal::print::{bytes, count, table};

/// Formats the report as tables.
#[must_use]
pub fn tables(report: &Report) -> String {
    let mut parts = vec![head(report)];
    parts.extend(rates(report));
    parts.extend(index(report));
    parts.push(format!("{:.0} s in all; medians of {} rounds", report.seconds, report.runs));
    parts.join("\n")
}

fn head(r: &Report) -> String {
    let mut head = format!(
        "{}: pages of {} ({} tokens), {} per call, in {}",
        r.shape,
        bytes(r.page_bytes),
        r.page_tokens,
        r.call_pages,
        r.machine.dir
    );
    if let (Some(write), Some(read)) = (r.machine.raw_write, r.machine.raw_read) {
        head += &format!(
            "\n{}, {}, buffers in {} pages; raw writes {} x {}, raw reads {} x {}",
            r.machine.file_system,
            r.machine.io,
            r.machine.buffers,
            bytes(write.op_bytes as u64),
            write.depth,
            bytes(read.op_bytes as u64),
            read.depth
        );
    }
    if !r.machine.io_why.is_empty() {
        head += &format!("\nnote: {}", r.machine.io_why);
    }
    head
}

fn rates(r: &Report) -> Option<String> {
    let raw = r.raw.as_ref()?;
    // The last column: the sum of the CPU seconds per GiB of the raw I/O and of one read of the
    // bytes from memory. A checksum needs this read.
    let mut out = table(&["", "GiB/s", "raw GiB/s", "ratio", "CPU s/GiB", "raw I/O + one read"]);
    let mut row = |name: &str, moved: Option<&Moved>, rate: f64, cpu: f64| {
        if let Some(moved) = moved {
            out.add_row([
                name.to_owned(),
                format!("{:.2}", moved.gib_s),
                format!("{rate:.2}"),
                format!("{:.2}", moved.ratio),
                format!("{:.3}", moved.cpu_s_per_gib),
                format!("{:.3}", cpu + raw.memory_read_cpu_s_per_gib),
            ]);
        }
    };
    let (write_cpu, read_cpu) = (raw.write_cpu_s_per_gib, raw.read_cpu_s_per_gib);
    row("put + flush, overwriting", r.put.as_ref(), raw.write_gib_s, write_cpu);
    row("put + flush, fresh space", r.put_fresh.as_ref(), raw.write_fresh_gib_s, write_cpu);
    row("cold get", r.get.as_ref(), raw.read_gib_s, read_cpu);
    let mut text = format!("{out}\nmemcpy {:.1} GiB/s on one thread", raw.memcpy_gib_s);
    if let (Some(files), Some(disk), Some(put)) = (r.files, r.bytes_on_disk, r.bytes_put) {
        let segments = put / r.segment_bytes.unwrap_or(1).max(1);
        text += &format!(
            "\n{files} files (target: at most {}), {} on disk for {} put: {:.2} times as much",
            segments + 16,
            bytes(disk),
            bytes(put),
            disk as f64 / put.max(1) as f64
        );
    }
    if let Some(encoded) = &r.encoded {
        text += &format!(
            "\n{}: {:.3} of the size; relative to raw pages: put {:.2}, into fresh space {:.2}, get {:.2}; \
             CPU of a put {:.2}, of a get {:.2}\n{} encoded pages fit into {} of segments, and {} raw pages: ratio {:.2}",
            encoded.codec,
            encoded.size,
            encoded.put_ratio,
            encoded.put_fresh_ratio,
            encoded.get_ratio,
            encoded.put_cpu_ratio,
            encoded.get_cpu_ratio,
            encoded.kept.encoded_pages,
            bytes(encoded.kept.segments_bytes),
            encoded.kept.raw_pages,
            encoded.kept.ratio
        );
    }
    Some(text)
}

fn index(r: &Report) -> Option<String> {
    let probe = r.probe.as_ref()?;
    let title = format!("index of {} pages", count(probe.entries));
    let mut out = table(&[&title, "", "target"]);
    let mut row = |name: &str, value: Option<f64>, unit: &str, reach: &str| {
        let shown = match value {
            Some(value) if value < 10.0 => format!("{value:.2} {unit}"),
            Some(value) => format!("{value:.0} {unit}"),
            None => "not measured".to_owned(),
        };
        out.add_row([name, &shown, reach]);
    };
    let pages = probe.pages;
    row(&format!("probe of {pages} pages, warm, p50"), Some(probe.p50_us), "µs", "1 µs");
    row("  p99", Some(probe.p99_us), "µs", "");
    row("  cold, p50", Some(probe.cold_p50_us), "µs", "2 µs");
    row("  of the index alone, warm, p50", Some(probe.index_p50_us), "µs", "");
    row("  of the index alone, cold, p50", Some(probe.index_cold_p50_us), "µs", "");
    row("  from Python, p50", probe.python_p50_us, "µs", "20 µs");
    row("  through the socket, p50", probe.socket_p50_us, "µs", "60 µs");
    row("reopen, warm", r.reopen_ms, "ms", "100 ms");
    row("  of the index alone", r.reopen_index_ms, "ms", "");
    row("  cold", r.reopen_cold_ms, "ms", "");
    let more = r.memory_more.as_ref();
    row("index memory per page, runs of 32", r.memory_bytes_per_page, "B", "64 B");
    row("  of the whole store", more.map(|more| more.store), "B", "");
    row("index memory per page, runs of 1", r.memory_bytes_per_page_single, "B", "128 B");
    row("  of the whole store", more.map(|more| more.store_single), "B", "");
    Some(out.to_string())
}

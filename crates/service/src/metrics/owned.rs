//! The metrics of a store whose owner answers.

use super::families::{Definition, Histogram, Rows, label};
use super::{names, scope_labels};
use ritornello_store::{CatalogStats, DURATION_BOUNDS, LOOKUP_BOUNDS};
use std::collections::BTreeMap;

/// The owner's counters that become one series each: the name in `CatalogStats::counters`, and the
/// metric.
const COUNTERS: [(&str, &Definition); 35] = [
    ("probes", &names::PROBES),
    ("present_pages", &names::PRESENT_PAGES),
    ("refused_scopes", &names::REFUSED_SCOPES),
    ("deleted_pages", &names::DELETED_PAGES),
    ("damaged_pages", &names::DAMAGED_PAGES),
    ("scopes_dropped", &names::SCOPES_DROPPED),
    ("foreign_releases", &names::FOREIGN_RELEASES),
    ("runs_retained", &names::RUNS_RETAINED),
    ("retentions_displaced", &names::RETENTIONS_DISPLACED),
    ("retentions_lapsed", &names::RETENTIONS_LAPSED),
    ("runs_abandoned", &names::RUNS_ABANDONED),
    ("runs_failed", &names::RUNS_FAILED),
    ("syncs", &names::SYNCS),
    ("bytes_admitted", &names::ADMITTED),
    ("runs_moved", &names::RUNS_MOVED),
    ("segments_removed", &names::SEGMENTS_REMOVED),
    ("scrubbed_runs", &names::SCRUBBED_RUNS),
    ("scrubbed_bytes", &names::SCRUBBED),
    ("scrub_damaged_pages", &names::SCRUB_DAMAGED_PAGES),
    ("reclaim_waits", &names::RECLAIM_WAITS),
    ("leases_expired", &names::LEASES_EXPIRED),
    ("leases_shortened", &names::LEASES_SHORTENED),
    ("reopenings", &names::REOPENINGS),
    ("staging_refusals", &names::UNSTAGED_PAGES),
    ("unanswered", &names::UNANSWERED_CALLS),
    ("dropped_decisions", &names::DROPPED_DECISIONS),
    ("prefill_avoided_tokens", &names::PREFILL_AVOIDED_TOKENS),
    ("prefill_untimed_tokens", &names::PREFILL_UNTIMED_TOKENS),
    ("remote_read_bytes", &names::REMOTE_READ),
    ("remote_written_bytes", &names::REMOTE_WRITTEN),
    ("remote_breaker_openings", &names::REMOTE_BREAKER_OPENINGS),
    ("put_raw_bytes", &names::PUT_RAW),
    ("put_encoded_bytes", &names::PUT_ENCODED),
    ("probed_pages", &names::PROBED_PAGES),
    ("stored_pages", &names::STORED_PAGES),
];

/// The owner's counters of refused pages, and the value of the label `reason` for each. The reasons
/// are the words of `Refusal::word` (crates/store/src/catalog/types.rs); the owner counts
/// `no_space` and `deadline` together.
const REFUSALS: [(&str, &str); 7] = [
    ("refused_space", "no_space"),
    ("refused_metadata", "metadata"),
    ("refused_quota", "quota"),
    ("refused_admission", "admission"),
    ("refused_write_budget", "write_budget"),
    ("refused_index_memory", "index_memory"),
    ("refused_absent_space", "absent_space"),
];

/// The owner's counters of evicted pages, and the value of the label `cause` for each.
const EVICTIONS: [(&str, &str); 4] = [
    ("evicted_space", "space"),
    ("evicted_quota", "quota"),
    ("evicted_index", "index"),
    ("evicted_segment", "segment"),
];

/// The owner's counters whose names end with the value of a label: the prefix before the value, the
/// label, and the metric.
const PREFIXES: [(&str, &str, &Definition); 4] = [
    ("undelivered_", "reason", &names::UNDELIVERED_PAGES),
    ("decisions_", "outcome", &names::DECISIONS),
    ("gate_decisions_", "reason", &names::GATE_DECISIONS),
    ("remote_calls_", "reason", &names::REMOTE_CALLS),
];

/// Adds the metrics of a store whose owner answered with `stats`.
pub(super) fn add(rows: &mut Rows<'_>, stats: &CatalogStats) {
    add_state(rows, stats);
    add_counters(rows, stats);
    add_space(rows, stats);
    add_policies(rows, stats);
    add_index(rows, stats);
    rows.gauge(&names::SCOPES, [], stats.scopes);
    scope_labels::add(rows, stats);
}

fn add_state(rows: &mut Rows<'_>, stats: &CatalogStats) {
    rows.gauge(
        &names::STORE_INFO,
        [
            ("uuid", label(&stats.uuid)),
            ("index", label(&stats.index)),
            ("durability", label(&stats.durability)),
            ("io", label(&stats.io.mode)),
            ("file_system", label(&stats.io.file_system)),
        ],
        1_u64,
    );
    rows.gauge(&names::POISONED, [], u64::from(stats.poisoned.is_some()));
    rows.gauge(&names::OWNER_EPOCH, [], u64::from(stats.owner_epoch));
    rows.gauge(&names::OPEN, [], stats.open_ms / 1e3);
    rows.gauge(&names::WARNINGS, [], stats.io.warnings.len() as u64);
    rows.gauge(&names::LEASES, [], stats.leases);
    rows.gauge(&names::CLIENTS, [], stats.clients);
    rows.gauge(&names::RESERVATIONS, [], stats.reservations);
    for (reason, items) in &stats.dropped_at_open {
        rows.gauge(&names::DROPPED_AT_OPEN, [("reason", label(reason))], *items);
    }
}

fn add_counters(rows: &mut Rows<'_>, stats: &CatalogStats) {
    let counter = |name: &str| stats.counters.get(name).copied();
    let tier = || [("tier", stats.tier().to_owned())];
    rows.gauge(&names::PAGES, tier(), stats.pages);
    rows.gauge(&names::RUNS, tier(), stats.runs);
    for (name, count) in &stats.counters {
        if let Some(reason) = name.strip_prefix("missed_") {
            let [tier] = tier();
            rows.counter(&names::MISSED_PAGES, [tier, ("reason", label(reason))], *count);
        }
    }
    for (name, definition) in COUNTERS {
        if let Some(value) = counter(name) {
            rows.counter(definition, [], value);
        }
    }
    for (name, cause) in EVICTIONS {
        if let Some(pages) = counter(name) {
            rows.counter(&names::EVICTED_PAGES, [("cause", cause.to_owned())], pages);
        }
    }
    for (name, reason) in REFUSALS {
        if let Some(pages) = counter(name) {
            rows.counter(&names::REFUSED_PAGES, [("reason", reason.to_owned())], pages);
        }
    }
    for (name, definition) in [
        ("hit_pages", &names::HIT_PAGES),
        ("get_bytes", &names::READ),
        ("read_pages", &names::READ_PAGES),
    ] {
        if let Some(value) = counter(name) {
            rows.counter(definition, tier(), value);
        }
    }
    for (prefix, key, definition) in PREFIXES {
        for (name, count) in &stats.counters {
            if let Some(value) = name.strip_prefix(prefix) {
                rows.counter(definition, [(key, label(value))], *count);
            }
        }
    }
    for (calls, sum, bounds, definition) in [
        ("timed_probes", ("probe_nanos", 1e9), LOOKUP_BOUNDS, &names::PROBE),
        ("puts", ("put_micros", 1e6), DURATION_BOUNDS, &names::PUT),
        ("gets", ("get_micros", 1e6), DURATION_BOUNDS, &names::GET),
    ] {
        if let Some(durations) = durations(&stats.counters, calls, sum, bounds) {
            rows.histogram(definition, tier(), durations);
        }
    }
    for (call, calls, sum) in
        [("get", "remote_gets", "remote_get_micros"), ("put", "remote_puts", "remote_put_micros")]
    {
        if let Some(durations) = durations(&stats.counters, calls, (sum, 1e6), DURATION_BOUNDS) {
            rows.histogram(&names::REMOTE_CALL, [("call", call.to_owned())], durations);
        }
    }
    for (call, name) in [("get", "queued_gets"), ("put", "queued_puts")] {
        if let Some(calls) = counter(name) {
            rows.gauge(&names::QUEUED_CALLS, [("call", call.to_owned())], calls);
        }
    }
    for (name, tier, definition) in [
        ("queued_host_bytes", "host", &names::QUEUED),
        ("queued_disk_bytes", "disk", &names::QUEUED),
        ("queued_remote_bytes", "remote", &names::QUEUED),
        ("loading_host_bytes", "host", &names::LOADING),
        ("loading_disk_bytes", "disk", &names::LOADING),
        ("loading_remote_bytes", "remote", &names::LOADING),
    ] {
        if let Some(bytes) = counter(name) {
            rows.gauge(definition, [("tier", tier.to_owned())], bytes);
        }
    }
    for (name, definition) in [
        ("sync_micros", &names::SYNC),
        ("prefill_avoided_micros", &names::PREFILL_AVOIDED),
        ("prefill_load_micros", &names::PREFILL_LOAD),
        ("gate_load_micros", &names::GATE_LOAD),
        ("gate_regret_micros", &names::GATE_REGRET),
        ("remote_breaker_open_micros", &names::REMOTE_BREAKER_OPEN),
    ] {
        if let Some(micros) = counter(name) {
            rows.counter(definition, [], micros as f64 / 1e6);
        }
    }
    let causes = [
        ("put", counter("bytes_written")),
        ("move", counter("bytes_moved")),
        ("index", Some(stats.index_written_bytes)),
    ];
    for (cause, bytes) in causes {
        if let Some(bytes) = bytes {
            let [tier] = tier();
            rows.counter(&names::WRITTEN, [tier, ("cause", cause.to_owned())], bytes);
        }
    }
    rows.gauge(&names::WRITE_AMPLIFICATION, [], stats.health.write_amplification);
}

/// The durations of `calls`. `sum`: the name of the counter of their sum, and the number of its
/// units in a second; `bounds`: the upper bounds of the buckets, in microseconds. `None` if the
/// owner does not count these calls.
fn durations(
    counters: &BTreeMap<String, u64>,
    calls: &str,
    (sum, per_second): (&str, f64),
    bounds: [u64; 11],
) -> Option<Histogram> {
    let counter = |name: &str| counters.get(name).copied();
    let mut below = 0;
    let buckets = bounds.map(|bound| {
        let within = counter(&format!("{calls}_within_{bound}_us")).unwrap_or(below).max(below);
        let bucket = (bound as f64 / 1e6, within - below);
        below = within;
        bucket
    });
    // The owner reads the numbers of puts and gets before their buckets, so a number may lack
    // calls that the buckets count.
    let count = counter(calls)?.max(below);
    let longer = (f64::INFINITY, count - below);
    let buckets = buckets.into_iter().chain([longer]).collect();
    Some(Histogram { sum: counter(sum)? as f64 / per_second, count, buckets })
}

fn add_space(rows: &mut Rows<'_>, stats: &CatalogStats) {
    let health = &stats.health;
    rows.gauge(&names::CAPACITY, [], stats.capacity_bytes);
    rows.gauge(&names::ALLOCATED, [], stats.allocated_bytes);
    rows.gauge(&names::USED, [], stats.used_bytes);
    rows.gauge(&names::FREE, [], stats.free_bytes);
    rows.gauge(&names::RESERVE, [], health.reserve_bytes);
    rows.gauge(&names::LIMBO, [], stats.limbo_bytes);
    rows.gauge(&names::DEFERRED, [], stats.deferred_bytes);
    rows.gauge(&names::RESERVED, [], stats.reserved_bytes);
    rows.gauge(&names::QUARANTINED, [], stats.quarantined_bytes);
    rows.gauge(&names::RETAINED, [], stats.retained_bytes);
    rows.gauge(&names::PADDING, [], health.padding_bytes);
    rows.gauge(&names::SEALED, [], health.sealed_bytes);
    rows.gauge(&names::SEGMENTS, [], stats.segments);
    rows.gauge(&names::SEGMENTS_MAX, [], stats.segments_max);
    rows.gauge(&names::EXTENTS_PER_RUN, [], health.extents_per_run);
    rows.gauge(&names::ABSENT_RUNS, [], stats.absent_space.runs);
    rows.gauge(&names::ABSENT_SPACES, [], stats.absent_space.reasons.len() as u64);
    for volume in &stats.paths {
        let labels = || [("volume", label(&volume.dir))];
        rows.gauge(&names::VOLUME_USED, labels(), volume.used_bytes);
        rows.gauge(&names::VOLUME_SEGMENTS, labels(), volume.segments);
        rows.gauge(&names::VOLUME_PRESENT, labels(), u64::from(volume.absent.is_none()));
        rows.gauge(&names::VOLUME_DRAINING, labels(), u64::from(volume.draining));
    }
}

fn add_policies(rows: &mut Rows<'_>, stats: &CatalogStats) {
    let admission = &stats.admission;
    rows.gauge(&names::GHOST_PAGES, [], admission.ghost_pages);
    if let Some(bytes) = admission.budget_bytes_per_day {
        rows.gauge(&names::WRITE_BUDGET_PER_DAY, [], bytes);
    }
    if let Some(bytes) = admission.available_bytes {
        rows.gauge(&names::WRITE_BUDGET_AVAILABLE, [], bytes);
    }
    rows.counter(&names::EVICTION_SWITCHES, [], stats.eviction.switches);
    for shadow in &stats.eviction.shadows {
        let labels = || [("policy", label(&shadow.name))];
        rows.gauge(&names::EVICTION_FOLLOWED, labels(), u64::from(shadow.followed));
        rows.counter(&names::SHADOW_REQUESTED_PAGES, labels(), shadow.requested);
        rows.counter(&names::SHADOW_HIT_PAGES, labels(), shadow.hits);
    }
}

fn add_index(rows: &mut Rows<'_>, stats: &CatalogStats) {
    rows.gauge(&names::INDEX_MEMORY, [], stats.index_memory_bytes);
    if stats.index_memory_max_bytes > 0 {
        rows.gauge(&names::INDEX_MEMORY_MAX, [], stats.index_memory_max_bytes);
    }
    rows.gauge(&names::INDEX_DISK, [], stats.index_disk_bytes);
    if let Some(tuning) = &stats.index_tuning {
        rows.gauge(&names::INDEX_SIZE_RATIO, [], u64::from(tuning.ratio));
        rows.gauge(&names::INDEX_RUNS_PER_LEVEL, [], u64::from(tuning.runs));
        rows.gauge(&names::INDEX_LEVELS, [], u64::from(tuning.levels));
        rows.gauge(&names::INDEX_SORTED_RUNS, [], tuning.sorted_runs);
    }
}

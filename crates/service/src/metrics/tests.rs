use super::names::ALL;
use super::*;
use crate::observer::Observation;
use ritornello_store::{CatalogStats, ScopeUsage};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

fn named(stats: CatalogStats) -> Named {
    let observed = Ok(Observed::Owned(Box::new(stats)));
    let took = Duration::from_millis(1);
    let drives = vec![("/nvme/kv".to_owned(), 5000)];
    let observation = Arc::new(Observation { observed, drives, took });
    Named { store: "/nvme/kv".to_owned(), observation }
}

fn scope(number: u64, model: &str) -> ScopeUsage {
    let (id, model) = (format!("{number:032x}"), model.to_owned());
    ScopeUsage { id, model, pages: 10, bytes: 100, ..ScopeUsage::default() }
}

fn samples<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let begins =
        |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
    text.lines().filter(begins).collect()
}

/// The names of the metrics in the table of `docs/service.md`, with unit and suffix and without
/// `ritornello_`.
fn documented() -> BTreeSet<&'static str> {
    let document = include_str!("../../../../docs/service.md");
    let rows = document.lines().filter_map(|line| line.strip_prefix("| `ritornello_"));
    rows.map(|row| row.split_once('`').unwrap().0).collect()
}

/// All counters of an owner, with the value zero.
fn all_counters() -> BTreeMap<String, u64> {
    let transfers = ritornello_store::TransferTotals::default();
    ritornello_store::Counters::default()
        .snapshot()
        .into_iter()
        .chain(transfers.by_name())
        .chain(ritornello_store::DecisionCounts::default().by_name())
        .collect()
}

#[test]
fn document_lists_exactly_the_metrics() {
    let names: BTreeSet<_> = ALL.iter().map(|definition| definition.full_name()).collect();
    let document = documented();
    let of_document: BTreeSet<_> = document
        .iter()
        .map(|name| name.strip_suffix("_total").unwrap_or(name).to_owned())
        .collect();
    assert_eq!(of_document, names);
    // The document writes the name of a counter, and of no other metric, with the suffix `_total`.
    let counters = all_counters();
    let text = encode(&[named(CatalogStats { counters, ..CatalogStats::default() })]).unwrap();
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ritornello_")) {
        let (name, kind) = line.split_once(' ').unwrap();
        let suffix = if kind == "counter" { "_total" } else { "" };
        assert!(document.contains(&*format!("{name}{suffix}")), "{name}{suffix}");
    }
}

#[test]
fn names_are_unique_and_have_help() {
    let names: BTreeSet<_> = ALL.iter().map(|definition| definition.name).collect();
    assert_eq!(names.len(), ALL.len());
    for definition in ALL {
        assert!(definition.help.len() > 10 && !definition.help.ends_with('.'));
        let legal = |char: char| char.is_ascii_lowercase() || char == '_';
        assert!(definition.name.chars().all(legal), "{}", definition.name);
    }
}

#[test]
fn model_names_cannot_add_labels_or_lines() {
    let hostile = "x\",store=\"stolen\"} 1\nritornello_up{store=\"forged\"} 1\r\\";
    let mut stats = CatalogStats { scopes: 1, ..CatalogStats::default() };
    stats.largest_scopes = vec![scope(1, hostile)];
    let text = encode(&[named(stats)]).unwrap();
    assert_eq!(samples(&text, "ritornello_up"), ["ritornello_up{store=\"/nvme/kv\"} 1"]);
    assert!(text.lines().all(|line| !line.starts_with("ritornello_up{store=\"forged")));
    let pages = samples(&text, "ritornello_scope_pages");
    assert_eq!(pages.len(), 1, "{pages:?}");
    assert!(pages[0].contains("model=\"x\\\",store=\\\"stolen\\\"} 1\u{fffd}"), "{}", pages[0]);
    assert!(pages[0].ends_with("\\\\\"} 10"), "{}", pages[0]);
}

#[test]
fn scopes_beyond_the_limit_are_one_series() {
    let mut stats = CatalogStats { scopes: 20, pages: 200, used_bytes: 2100, ..Default::default() };
    stats.deferred_bytes = 100;
    stats.largest_scopes = (0..20).map(|number| scope(number, &"m".repeat(500))).collect();
    let text = encode(&[named(stats)]).unwrap();
    let pages = samples(&text, "ritornello_scope_pages");
    assert_eq!(pages.len(), SCOPES_MAX_AND_OTHER);
    assert_eq!(pages.last().unwrap().split(' ').next_back(), Some("40"));
    let used = samples(&text, "ritornello_scope_used_bytes");
    assert_eq!(used.last().unwrap().split(' ').next_back(), Some("400"));
    assert!(pages[0].len() < 300, "{}", pages[0]);
}

const SCOPES_MAX_AND_OTHER: usize = 17;

#[test]
fn long_names_with_equal_beginning_are_different_series() {
    let long = "d".repeat(200);
    let [one, other] = [1, 2].map(|end| families::label(&format!("/{long}{end}")));
    assert_ne!(one, other);
    for label in [one, other] {
        assert_eq!(label.chars().count(), 128, "{label}");
        assert!(label.starts_with("/ddd"), "{label}");
    }
    let fits = "\u{e9}".repeat(128);
    assert_eq!(families::label(&fits), fits);
}

#[test]
fn durations_are_histograms() {
    let mut stats = CatalogStats::default();
    let counters = [("gets", 4), ("get_micros", 2_000_150), ("gets_within_100_us", 1)];
    stats.counters = counters.map(|(name, count)| (name.to_owned(), count)).into();
    for bound in ritornello_store::DURATION_BOUNDS.iter().skip(1) {
        stats.counters.insert(format!("gets_within_{bound}_us"), 3);
    }
    let text = encode(&[named(stats)]).unwrap();
    let values = |name| -> Vec<String> {
        let value = |line: &&str| line.rsplit(' ').next().unwrap().to_owned();
        samples(&text, name).iter().map(value).collect()
    };
    assert_eq!(values("ritornello_get_seconds_sum"), ["2.00015"]);
    assert_eq!(values("ritornello_get_seconds_count"), ["4"]);
    let buckets = samples(&text, "ritornello_get_seconds_bucket");
    assert_eq!(buckets.len(), ritornello_store::DURATION_BOUNDS.len() + 1);
    assert!(buckets[0].contains("le=\"0.0001\"") && buckets[0].ends_with(" 1"), "{buckets:?}");
    assert!(buckets[1].ends_with(" 3") && buckets[10].ends_with(" 3"), "{buckets:?}");
    assert!(buckets[11].contains("le=\"+Inf\"") && buckets[11].ends_with(" 4"), "{buckets:?}");
    assert!(samples(&text, "ritornello_put_seconds_count").is_empty());
}

#[test]
fn remote_reads_and_writes_are_separate_histograms() {
    let mut stats = CatalogStats::default();
    let counters = [
        ("remote_gets", 5),
        ("remote_get_micros", 21_500_000),
        ("remote_gets_within_100_us", 1),
        ("remote_gets_within_300_us", 3),
        ("remote_puts", 7),
        ("remote_put_micros", 2_000_000),
    ];
    stats.counters = counters.map(|(name, count)| (name.to_owned(), count)).into();
    for bound in ritornello_store::DURATION_BOUNDS {
        stats.counters.entry(format!("remote_gets_within_{bound}_us")).or_insert(4);
        stats.counters.insert(format!("remote_puts_within_{bound}_us"), 7);
    }
    let text = encode(&[named(stats)]).unwrap();
    let series = |name: &str| samples(&text, &format!("ritornello_remote_call_seconds_{name}"));
    let get = r#"store="/nvme/kv",call="get"}"#;
    let put = r#"store="/nvme/kv",call="put"}"#;
    let with_prefix = |name: &str, values: [(&str, &str); 2]| {
        values.map(|(labels, value)| {
            format!("ritornello_remote_call_seconds_{name}{{{labels} {value}")
        })
    };
    assert_eq!(series("sum"), with_prefix("sum", [(get, "21.5"), (put, "2.0")]));
    assert_eq!(series("count"), with_prefix("count", [(get, "5"), (put, "7")]));
    let buckets = series("bucket");
    let count_of = |labels: &str, bound: &str| {
        let begin = format!("ritornello_remote_call_seconds_bucket{{le=\"{bound}\",{labels} ");
        buckets.iter().find_map(|line| line.strip_prefix(&begin)).unwrap().to_owned()
    };
    let bounds = ["0.0001", "0.0003", "0.001", "10.0", "+Inf"];
    assert_eq!(bounds.map(|bound| count_of(get, bound)), ["1", "3", "4", "4", "5"]);
    assert_eq!(bounds.map(|bound| count_of(put, bound)), ["7"; 5]);
    assert_eq!(buckets.len(), 2 * (ritornello_store::DURATION_BOUNDS.len() + 1));
    // The histogram of the store excludes the calls of remotes.
    assert!(samples(&text, "ritornello_get_seconds_count").is_empty());
}

#[test]
fn avoided_prefill_is_counted_in_tokens_and_seconds() {
    let mut stats = CatalogStats::default();
    let counters = [("prefill_avoided_tokens", 900), ("prefill_avoided_micros", 2_500_000)];
    stats.counters = counters.map(|(name, count)| (name.to_owned(), count)).into();
    let text = encode(&[named(stats)]).unwrap();
    let [tokens] = samples(&text, "ritornello_prefill_avoided_tokens_total")[..] else { panic!() };
    let [seconds] = samples(&text, "ritornello_prefill_avoided_seconds_total")[..] else {
        panic!()
    };
    assert_eq!(tokens, "ritornello_prefill_avoided_tokens_total{store=\"/nvme/kv\"} 900");
    assert!(seconds.ends_with(" 2.5"), "{seconds}");
    assert!(samples(&text, "ritornello_prefill_load_seconds_total").is_empty());
}

#[test]
fn counts_of_caches_have_labels_and_units() {
    let mut stats = CatalogStats::default();
    let counters = [
        ("decisions_hit", 1),
        ("gate_decisions_none", 2),
        ("gate_regret_micros", 1_500_000),
        ("remote_calls_put", 3),
        ("remote_calls_failures", 4),
        ("remote_written_bytes", 5),
        ("remote_breaker_openings", 6),
        ("remote_breaker_open_micros", 7_250_000),
        ("missed_evicted", 8),
        ("queued_puts", 9),
        ("queued_remote_bytes", 10),
        ("loading_host_bytes", 11),
    ];
    stats.counters = counters.map(|(name, count)| (name.to_owned(), count)).into();
    let text = encode(&[named(stats)]).unwrap();
    let series = |name: &str| samples(&text, name).join(", ").replace(r#"store="/nvme/kv""#, "S");
    for (name, expected) in [
        ("decisions_total", r#"{S,outcome="hit"} 1"#),
        ("gate_decisions_total", r#"{S,reason="none"} 2"#),
        ("gate_regret_seconds_total", "{S} 1.5"),
        ("remote_written_bytes_total", "{S} 5"),
        ("remote_breaker_openings_total", "{S} 6"),
        ("remote_breaker_open_seconds_total", "{S} 7.25"),
        ("missed_pages_total", r#"{S,tier="disk",reason="evicted"} 8"#),
        ("queued_calls", r#"{S,call="put"} 9"#),
        ("queued_bytes", r#"{S,tier="remote"} 10"#),
        ("loading_bytes", r#"{S,tier="host"} 11"#),
    ] {
        let name = format!("ritornello_{name}");
        assert_eq!(series(&name), format!("{name}{expected}"));
    }
    let calls = samples(&text, "ritornello_remote_calls_total");
    assert_eq!(calls.len(), 2, "{calls:?}");
    assert!(calls[0].ends_with(r#"reason="failures"} 4"#), "{calls:?}");
    assert!(calls[1].ends_with(r#"reason="put"} 3"#), "{calls:?}");
}

#[test]
fn store_in_memory_is_the_host_tier() {
    let mut stats = CatalogStats::default();
    let pages = |stats: &CatalogStats| {
        samples(&encode(&[named(stats.clone())]).unwrap(), "ritornello_pages").join("")
    };
    assert!(pages(&stats).contains("tier=\"disk\""), "{}", pages(&stats));
    stats.io.mode = "mapped".to_owned();
    assert!(pages(&stats).contains("tier=\"host\""), "{}", pages(&stats));
}

#[test]
fn failed_observation_is_not_up() {
    let observation = Arc::new(Observation {
        observed: Err(Problem::retry("the disk hangs")),
        drives: Vec::new(),
        took: Duration::from_secs(5),
    });
    let text = encode(&[Named { store: "/gone".to_owned(), observation }]).unwrap();
    assert_eq!(samples(&text, "ritornello_up"), ["ritornello_up{store=\"/gone\"} 0"]);
    assert_eq!(samples(&text, "ritornello_pages"), [""; 0]);
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn every_counter_but_the_sums_has_a_series() {
    let counters = all_counters();
    let mut stats = CatalogStats { counters, ..CatalogStats::default() };
    // Give each counter a distinct value, so that the text shows which counters have a series.
    for (at, value) in stats.counters.values_mut().enumerate() {
        *value = 7_000_001 + at as u64;
    }
    let text = encode(&[named(stats.clone())]).unwrap();
    for (name, value) in &stats.counters {
        let units = [("_micros", 1e6), ("_nanos", 1e9)];
        let per_second = units.iter().find(|(unit, _)| name.ends_with(unit));
        let seconds = per_second.map(|(_, per_second)| (*value as f64 / per_second).to_string());
        let shown = seconds.unwrap_or_else(|| value.to_string());
        // `refused_pages` and `evicted_pages` have one series per reason or cause, and none for
        // the sum.
        let is_sum = ["refused_pages", "evicted_pages"].contains(&name.as_str());
        // `probes` includes these lookups.
        let is_sum = is_sum || name == "unregistered_probes";
        // Histograms show the numbers of calls and their durations: see `durations_are_histograms`
        // and `remote_reads_and_writes_are_separate_histograms`.
        let histograms = ["puts", "gets", "timed_probes", "remote_gets", "remote_puts"];
        if histograms.contains(&name.as_str()) || name.contains("_within_") {
            continue;
        }
        let found = text.lines().any(|line| line.ends_with(&format!(" {shown}")));
        assert!(found != is_sum, "{name} = {shown}");
    }
}

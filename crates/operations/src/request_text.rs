//! Describes, as text, the decisions about a request.

use crate::explanation_text::{age, describe};
use ritornello_store::{Decision, DecisionMemory, DecisionOutcome, ExplainedRequest};
use std::time::{SystemTime, UNIX_EPOCH};

/// Describes the decisions about the request that `asked` names, and why its pages are hits or
/// misses now.
pub(crate) fn describe_request(
    asked: &str,
    requests: &[ExplainedRequest],
    memory: &DecisionMemory,
) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut lines = Vec::new();
    for entry in requests {
        lines.push(format!("request {}", entry.request.escape_debug()));
        lines.extend(entry.decisions.iter().map(|decision| line(decision, now)));
        if entry.explanation.spans.is_empty() {
            lines.push(format!("scope {}: the decision has no keys to explain", entry.scope));
        } else {
            lines.push(describe(entry.scope, &entry.explanation));
        }
    }
    if requests.is_empty() {
        let asked: String = asked.escape_debug().take(128).collect();
        lines.push(format!("no decision about request {asked} is remembered"));
        lines.push(
            "vLLM reports decisions after about 2 s; SGLang and LMCache report none: ask with --scope \
             and --keys"
                .to_owned(),
        );
    }
    lines
        .push(format!("the owner's memory of decisions begins {}", age(memory.remembered_seconds)));
    if memory.dropped > 0 {
        lines.push(format!("{} decisions were dropped before they were reported", memory.dropped));
    }
    lines.join("\n")
}

/// Describes a decision in one line. `now`: seconds since 1970.
fn line(decision: &Decision, now: u64) -> String {
    let Decision { pages, found, loaded, outcome, .. } = *decision;
    let ago = age(now.saturating_sub(decision.unix_millis / 1000));
    let found = format!("{found} of {pages} pages found");
    let said = match outcome {
        DecisionOutcome::Loaded => format!("{found}, {loaded} to load"),
        DecisionOutcome::Declined => {
            format!("{found}, none to load: the gate chose to compute them")
        }
        DecisionOutcome::Missed if decision.detail == "window" => {
            format!("{found}, none to load: pages of a group with a sliding window are missing")
        }
        DecisionOutcome::Missed => format!("{found}, none to load"),
        DecisionOutcome::NotNeeded => format!("{found}, none to load: the engine has all {pages}"),
        DecisionOutcome::TooShort => {
            "not looked up: the prompt has no complete page before its last token".to_owned()
        }
        DecisionOutcome::Waiting => {
            format!("{pages} pages looked up; the request waits for a remote or another tier")
        }
        DecisionOutcome::NotCacheable => {
            format!("{pages} pages, none to load: the request must not load pages")
        }
        DecisionOutcome::Failed => "the lookup failed: see the engine's log".to_owned(),
    };
    let detail = match decision.detail.as_str() {
        "" => String::new(),
        "window" if outcome == DecisionOutcome::Missed => String::new(),
        detail => format!(" ({})", detail.escape_debug()),
    };
    let estimate = decision.estimate.map(|times| {
        let millis = |micros: u64| micros as f64 / 1e3;
        let (with, without) = (millis(times.with_load_micros), millis(times.without_load_micros));
        format!("; estimated {with:.1} ms with a load, {without:.1} ms without")
    });
    format!("{ago}: {said}{detail}{}", estimate.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_format::ScopeId;
    use ritornello_store::DecisionEstimate;

    fn decision(outcome: DecisionOutcome) -> Decision {
        let made = Decision::now("r", ScopeId::default(), outcome);
        Decision { unix_millis: 60_999, pages: 9, found: 4, loaded: 3, ..made }
    }

    #[test]
    fn every_outcome_has_its_line() {
        let lines = DecisionOutcome::ALL.map(|outcome| line(&decision(outcome), 100));
        assert_eq!(lines[0], "40 s ago: 4 of 9 pages found, 3 to load");
        assert!(lines.iter().all(|line| line.starts_with("40 s ago: ")), "{lines:?}");
        assert!((1..lines.len()).all(|at| !lines[..at].contains(&lines[at])), "{lines:?}");
        // The clocks of the processes may differ.
        assert!(line(&decision(DecisionOutcome::Missed), 0).starts_with("0 s ago"));
        let declined = Decision {
            detail: "why".to_owned(),
            estimate: Some(DecisionEstimate {
                with_load_micros: 9_000,
                without_load_micros: 1_700,
            }),
            ..decision(DecisionOutcome::Declined)
        };
        let line = line(&declined, 100);
        assert!(line.ends_with("(why); estimated 9.0 ms with a load, 1.7 ms without"), "{line}");
    }

    #[test]
    fn unknown_request_is_named_with_the_age_of_the_memory() {
        let memory = DecisionMemory { remembered_seconds: 7_200, forgotten: 4, dropped: 3 };
        let text = describe_request("r\u{1b}[2J", &[], &memory);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "no decision about request r\\u{1b}[2J is remembered");
        assert_eq!(lines[2], "the owner's memory of decisions begins 2 h ago");
        assert_eq!(lines[3], "3 decisions were dropped before they were reported");
    }
}

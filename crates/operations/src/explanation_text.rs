//! Explanations of hits and misses in text.

use ritornello_format::{FieldDifference, ScopeId};
use ritornello_store::{Answer, Explanation, KeySpan, OtherScope};
use ritornello_terminal::print::count;

/// Describes an explanation of pages in the scope `id`, one line for each span.
pub(crate) fn describe(id: ScopeId, explanation: &Explanation) -> String {
    let keys: u32 = explanation.spans.iter().map(|span| span.pages).sum();
    let hits = explanation.spans.iter().filter(|span| span.answer == Answer::Hit);
    let hits: u32 = hits.map(|span| span.pages).sum();
    let mut lines = vec![format!("scope {id}: {hits} of {keys} pages are hits")];
    if !explanation.is_registered {
        lines.push(
            "the scope is not registered: it had no put and no settings, or it was dropped"
                .to_owned(),
        );
    }
    lines.extend(explanation.spans.iter().map(|span| line(span, explanation)));
    if hits < keys {
        let ago = age(explanation.remembered_seconds);
        lines.push(format!("the owner opened the store {ago}, and remembers nothing earlier"));
    }
    lines.join("\n")
}

/// One line about a span: its keys and the answer, for most answers with advice.
fn line(span: &KeySpan, explanation: &Explanation) -> String {
    let KeySpan { at, pages, .. } = *span;
    let keys = match pages {
        1 => format!("key {at}"),
        _ => format!("keys {at} to {}", at + pages - 1),
    };
    let ago = span.seconds_ago.map(|seconds| format!(" {}", age(seconds))).unwrap_or_default();
    let detail = span.detail.as_str();
    let said = match span.answer {
        // Owners of earlier builds name no tier.
        Answer::Hit if detail.is_empty() => "hit".to_owned(),
        Answer::Hit => format!("hit ({detail})"),
        Answer::BehindMissing => {
            "stored, but behind a missing page: a get delivers them when that page is a hit again"
                .to_owned()
        }
        Answer::NotYetVisible => "being put now: ask again when the put has ended".to_owned(),
        Answer::AbsentVolume => {
            format!("stored in space that is absent ({detail}): mount it, or check its disk")
        }
        Answer::Evicted => {
            let (cause, by) = match detail.split_once(" by ") {
                None => (detail, String::new()),
                Some((cause, policy)) => (cause, format!(" by the policy {policy}")),
            };
            format!("evicted{ago}{by}, {}", evicted(cause))
        }
        Answer::Removed => format!("removed{ago}, {}", removed(detail)),
        Answer::Damaged => {
            format!("removed as damaged{ago}, {}", damaged(detail))
        }
        Answer::Refused => format!("offered{ago} and refused, {}", refused(detail)),
        Answer::Abandoned => {
            format!(
                "a put had space for them and gave it up{ago}: see the log of the process that put"
            )
        }
        Answer::OtherScope => other_scope(detail, &explanation.other_scopes),
        Answer::Unknown => unknown(detail).to_owned(),
    };
    format!("{keys}: {said}")
}

fn unknown(why: &str) -> &'static str {
    match why {
        "not_offered" => {
            "not stored, and no put asked the owner to store them since it opened the store"
        }
        "forgotten" => {
            "not known: the owner may have forgotten why they are missing, or no put offered them"
        }
        _ => "not known: no put of them reached the owner, or it forgot them",
    }
}

fn evicted(cause: &str) -> String {
    match cause {
        "space" => {
            "because a put needed space: raise the capacity (`ritornello resize`)".to_owned()
        }
        "quota" => "because the scope reached its quota: raise the quota".to_owned(),
        "index" => {
            "because the index reached a limit: raise its memory ceiling or the capacity".to_owned()
        }
        "segment" => "because a smaller capacity or a drain removed its segment".to_owned(),
        other => format!("because of {other}"),
    }
}

fn removed(cause: &str) -> String {
    match cause {
        "deleted" => "because a caller deleted them, or a page before them".to_owned(),
        "scope_dropped" => "because the scope was dropped with all its pages".to_owned(),
        "directory_forgotten" => {
            "because their directory was forgotten (`ritornello paths forget`)".to_owned()
        }
        other => format!("because of {other}"),
    }
}

fn damaged(cause: &str) -> String {
    match cause {
        "verification" => "because they, or a page before them, failed verification: check the \
                           disk (dmesg), and put them again"
            .to_owned(),
        "space" => "because their space was lost while their directory was absent: put them again"
            .to_owned(),
        other => format!("because of {other}"),
    }
}

fn refused(reason: &str) -> String {
    match reason {
        "no_space" => {
            "because no space could be freed: raise the capacity, or retain less".to_owned()
        }
        "deadline" => "because no space was free in time: see `ritornello top`".to_owned(),
        "metadata" => "because the index could take no run: raise the capacity".to_owned(),
        "quota" => "because the scope reached its quota: raise the quota".to_owned(),
        "admission" => {
            "because pages are admitted when they are put again: put them again".to_owned()
        }
        "write_budget" => "because the write budget was used up: raise the budget".to_owned(),
        "index_memory" => {
            "because the index is at its memory ceiling: raise the ceiling".to_owned()
        }
        "absent_space" => "because pages of the put are in absent space: mount it".to_owned(),
        other => format!("because of {other}"),
    }
}

fn other_scope(id: &str, scopes: &[OtherScope]) -> String {
    let Some(OtherScope { model, differs, .. }) = scopes.iter().find(|scope| scope.id == id) else {
        return format!("stored in scope {id}");
    };
    let model: String = model.chars().take(32).collect();
    let stored = format!("not in this scope, but in scope {id} (model {model})");
    match differs {
        None => format!("{stored}; of this scope only the id is known, so they cannot be compared"),
        Some(fields) => {
            let shown = fields.iter().map(|FieldDifference { field, asked, stored }| {
                format!("{field} ({asked} here, {stored} there)")
            });
            let shown: Vec<String> = shown.collect();
            format!("{stored}, which differs in {}: make these settings equal", shown.join(", "))
        }
    }
}

/// Formats an age in the largest unit of which it has at least two; in seconds if it has no such
/// unit.
pub(crate) fn age(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s ago"),
        120..7_200 => format!("{} min ago", seconds / 60),
        7_200..172_800 => format!("{} h ago", seconds / 3_600),
        _ => format!("{} days ago", count(seconds / 86_400)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_store::remembered_answers;

    fn span(answer: Answer, detail: &str) -> KeySpan {
        KeySpan { at: 4, pages: 1, answer, detail: detail.to_owned(), seconds_ago: Some(40) }
    }

    #[test]
    fn lines_name_keys_and_known_age() {
        let explanation = Explanation::default();
        let evicted = line(&span(Answer::Evicted, "space"), &explanation);
        assert!(evicted.starts_with("key 4: evicted 40 s ago, because a put"), "{evicted}");
        let by_policy = line(&span(Answer::Evicted, "space by 2q"), &explanation);
        let (begin, end) = ("key 4: evicted 40 s ago by the policy 2q", ", because a put");
        assert!(by_policy.starts_with(&format!("{begin}{end}")), "{by_policy}");
        let several = KeySpan { pages: 3, seconds_ago: None, ..span(Answer::Hit, "") };
        assert_eq!(line(&several, &explanation), "keys 4 to 6: hit");
        let several = KeySpan { detail: "disk".to_owned(), ..several };
        assert_eq!(line(&several, &explanation), "keys 4 to 6: hit (disk)");
        assert_eq!(
            [age(119), age(120), age(7_200), age(172_800)].join(", "),
            "119 s ago, 2 min ago, 2 h ago, 2 days ago"
        );
    }

    #[test]
    fn every_remembered_answer_has_its_own_text() {
        let explanation = Explanation::default();
        let lines = remembered_answers().map(|(answer, detail)| {
            let said = line(&span(answer, &detail), &explanation);
            assert!(said.contains(": ") && !said.contains("because of"), "{said}");
            said
        });
        let lines: Vec<String> = lines.collect();
        assert!((1..lines.len()).all(|at| !lines[..at].contains(&lines[at])), "{lines:?}");
        let said = line(&span(Answer::Evicted, "a cause of a later version"), &explanation);
        assert!(said.ends_with("because of a cause of a later version"), "{said}");
        let said = line(&span(Answer::Evicted, "a later cause by a later policy"), &explanation);
        assert!(
            said.ends_with(" by the policy a later policy, because of a later cause"),
            "{said}"
        );
    }

    #[test]
    fn unknown_pages_are_described_as_not_offered_or_forgotten() {
        let explanation = Explanation::default();
        let said = |detail: &str| line(&span(Answer::Unknown, detail), &explanation);
        assert!(said("not_offered").contains("no put asked the owner to store them since it"));
        assert!(said("forgotten").contains("the owner may have forgotten"));
        // Owners of earlier builds give no detail.
        assert!(said("").contains("no put of them reached the owner, or it forgot them"));
    }

    #[test]
    fn differences_of_scopes_are_named() {
        let difference = |field: &str, asked: &str, stored: &str| FieldDifference {
            field: field.to_owned(),
            asked: asked.to_owned(),
            stored: stored.to_owned(),
        };
        let mut other = OtherScope {
            id: "ab".to_owned(),
            model: "m".to_owned(),
            differs: Some(vec![difference("dtype", "fp8", "bfloat16")]),
        };
        let said = |other: &OtherScope| other_scope("ab", std::slice::from_ref(other));
        assert!(said(&other).contains("dtype (fp8 here, bfloat16 there)"), "{}", said(&other));
        other.differs = None;
        assert!(said(&other).contains("only the id is known"), "{}", said(&other));
    }
}

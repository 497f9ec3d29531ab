//! Decisions of processes about the pages of prompts, as the owner remembers them.

use crate::catalog::bounded::{self, PackedList};
use crate::explanation::Explanation;
use ritornello_format::{KeyList, ScopeId, check_keys};
use serde::{Deserialize, Serialize};
use std::time::{SystemTime, UNIX_EPOCH};

/// Maximum bytes of a request's id. Longer ids are cut.
pub(crate) const REQUEST_BYTES_MAX: usize = 128;
/// Maximum bytes of a decision's detail. Longer details are cut.
const DETAIL_BYTES_MAX: usize = 256;
/// Maximum decisions in one message to the owner.
pub const REPORTED_DECISIONS_MAX: usize = 256;
/// Maximum keys of a decision. Further keys are not kept: otherwise decisions about a few long
/// prompts would displace all other decisions from the owner's memory, and their messages would not
/// fit the buffers of a connection.
pub const DECISION_KEYS_MAX: usize = 1024;
/// Maximum decisions that one call lists.
pub const LISTED_DECISIONS_MAX: usize = 1024;
/// Maximum decisions of a request that one call explains.
pub const EXPLAINED_DECISIONS_MAX: usize = 16;

/// A decision of a process after its lookup of a prompt's pages, or instead of a lookup.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// The engine's own id of the request.
    #[serde(deserialize_with = "bounded::text::<_, REQUEST_BYTES_MAX>")]
    pub request: String,
    /// Time of the decision, by the clock of the process.
    pub unix_millis: u64,
    /// The scope in which the keys were looked up. A page may consist of objects in several scopes:
    /// this is the scope of one of them.
    pub scope: ScopeId,
    /// Pages of the prompt.
    pub pages: u32,
    /// Leading pages of the prompt that were found.
    pub found: u32,
    /// Pages to load. Pages that were found are not loaded if the engine has them already.
    pub loaded: u32,
    /// The decision in one word.
    pub outcome: DecisionOutcome,
    /// The reason in the words of the process; empty if there is none.
    #[serde(deserialize_with = "bounded::text::<_, DETAIL_BYTES_MAX>")]
    pub detail: String,
    /// The times that the gate compared; `None` if they are unknown, or there is no gate.
    pub estimate: Option<DecisionEstimate>,
    /// Keys of the leading pages, at most [`DECISION_KEYS_MAX`]. Empty in listings.
    #[serde(with = "PackedList::<DECISION_KEYS_MAX>")]
    pub keys: KeyList,
}

/// The decision about the pages of a prompt in one word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DecisionOutcome {
    /// To load pages.
    Loaded,
    /// To compute pages that were found, because the gate chose so: it expects computing to be
    /// faster, or its mode is `never`.
    Declined,
    /// To compute the pages that were not found.
    #[default]
    Missed,
    /// To load nothing, because the engine has all pages of the prompt.
    NotNeeded,
    /// To look up nothing, because the prompt has no complete page before its last token.
    TooShort,
    /// To wait for a remote, or for pages that are being copied to a tier. A later decision
    /// follows.
    Waiting,
    /// To load nothing, because pages of the request must not be loaded. The detail says why.
    NotCacheable,
    /// To load nothing, because the lookup failed.
    Failed,
}

impl DecisionOutcome {
    /// All outcomes, in the order of their declaration.
    pub const ALL: [Self; 8] = [
        Self::Loaded,
        Self::Declined,
        Self::Missed,
        Self::NotNeeded,
        Self::TooShort,
        Self::Waiting,
        Self::NotCacheable,
        Self::Failed,
    ];

    /// The outcome in one word, as in JSON and metrics.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Loaded => "loaded",
            Self::Declined => "declined",
            Self::Missed => "missed",
            Self::NotNeeded => "not_needed",
            Self::TooShort => "too_short",
            Self::Waiting => "waiting",
            Self::NotCacheable => "not_cacheable",
            Self::Failed => "failed",
        }
    }

    /// Parses the word of an outcome.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|outcome| outcome.word() == word)
    }
}

/// Estimated times until all tokens of a prompt are loaded or computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionEstimate {
    /// With a load, in microseconds.
    pub with_load_micros: u64,
    /// Without a load, in microseconds.
    pub without_load_micros: u64,
}

/// Decisions that the owner remembers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionListing {
    /// In the order in which the owner received them, the last first; without keys.
    pub decisions: Vec<Decision>,
    /// Which decisions the owner may have forgotten or not received.
    pub memory: DecisionMemory,
}

/// Which decisions the owner may have forgotten or not received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionMemory {
    /// Seconds for which the owner has remembered every decision that it received: since it opened
    /// the store or, if it has forgotten decisions, since it received the last of the forgotten
    /// decisions.
    pub remembered_seconds: u64,
    /// Decisions that the owner has forgotten because its memory for decisions is limited.
    pub forgotten: u64,
    /// Decisions that processes could not report, because their buffers were full.
    pub dropped: u64,
}

/// The decisions about a request, and why its pages are hits or misses now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestExplanation {
    /// One entry for each request and scope; the entry with the newest decision first.
    pub requests: Vec<ExplainedRequest>,
    /// Which decisions the owner may have forgotten or not received.
    pub memory: DecisionMemory,
}

/// The decisions about one request in one scope.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplainedRequest {
    /// The engine's own id of the request.
    pub request: String,
    /// The scope in which the pages were looked up.
    pub scope: ScopeId,
    /// The newest decision first, without keys.
    pub decisions: Vec<Decision>,
    /// Why the pages of the newest decision are hits or misses now.
    pub explanation: Explanation,
}

impl Decision {
    /// A decision about the request `request`, made now, in the scope `scope`.
    #[must_use]
    pub fn now(request: &str, scope: ScopeId, outcome: DecisionOutcome) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let unix_millis = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        Self { request: request.to_owned(), unix_millis, scope, outcome, ..Self::default() }
    }

    /// Adds the keys of the prompt's pages, of which at most [`DECISION_KEYS_MAX`] are kept, and
    /// their number.
    #[must_use]
    pub fn with_pages(self, keys: &[&[u8]]) -> Self {
        let pages = u32::try_from(keys.len()).unwrap_or(u32::MAX);
        let keys = keys.iter().take(DECISION_KEYS_MAX).collect();
        Self { pages, keys, ..self }
    }

    /// Enforces the limits of all fields, because a decision may come from any process: cuts text,
    /// replaces control characters in text, limits `found` to `pages` and `loaded` to `found`, and
    /// removes all keys if a key is malformed or there are too many keys.
    #[must_use]
    pub fn bounded(mut self) -> Self {
        let are_valid = self.keys.iter().all(|key| check_keys(&[key]).is_ok());
        if self.keys.len() > DECISION_KEYS_MAX || !are_valid {
            self.keys = KeyList::default();
        }
        self.found = self.found.min(self.pages);
        self.loaded = self.loaded.min(self.found);
        self.request = bounded_text(&self.request, REQUEST_BYTES_MAX);
        self.detail = bounded_text(&self.detail, DETAIL_BYTES_MAX);
        self
    }

    /// Returns the decision without its keys.
    #[must_use]
    pub(crate) fn without_keys(&self) -> Self {
        Self {
            request: self.request.clone(),
            detail: self.detail.clone(),
            keys: KeyList::default(),
            ..*self
        }
    }

    /// Memory that the decision takes, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        // The fields count twice, because the capacity of a list may be twice its length.
        let keys = self.keys.bytes() + self.keys.len() * size_of::<usize>();
        2 * size_of::<Self>() + self.request.len() + self.detail.len() + keys
    }

    /// Whether the decision is about the request that `id` names: the engine's own id of the
    /// request is `id`, or continues after `id` with `-`, and may begin with a number and `_`. vLLM
    /// makes the id `cmpl-1-0-5d41402a` of the first prompt of its response `cmpl-1`, and the id
    /// `2_cmpl-1-0-5d41402a` of the third of several answers to this prompt.
    pub(crate) fn matches_id(&self, id: &str) -> bool {
        let continues = |own: &str| {
            own.strip_prefix(id).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
        };
        let answer = self.request.split_once('_').filter(|(number, _)| {
            !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit())
        });
        !id.is_empty()
            && (continues(&self.request) || answer.is_some_and(|(_, own)| continues(own)))
    }
}

/// Returns `text` cut to `bytes_max` bytes, with `?` in place of control characters.
pub(crate) fn bounded_text(text: &str, bytes_max: usize) -> String {
    let mut end = text.len().min(bytes_max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_ids_are_cut_between_characters() {
        let long = "ä".repeat(REQUEST_BYTES_MAX);
        let made = Decision::now(&long, ScopeId::default(), DecisionOutcome::Missed).bounded();
        assert_eq!(made.request, "ä".repeat(REQUEST_BYTES_MAX / 2));
        assert_eq!(bounded_text("a\u{1b}[2J\nb", 128), "a?[2J?b");
        let odd = format!("a{long}");
        assert_eq!(bounded_text(&odd, REQUEST_BYTES_MAX).len(), REQUEST_BYTES_MAX - 1);
    }

    #[test]
    fn keys_beyond_the_limit_are_counted_and_not_kept() {
        let keys: Vec<[u8; 32]> = (0..=DECISION_KEYS_MAX)
            .map(|page| std::array::from_fn(|at| (page >> (8 * (at % 2))) as u8))
            .collect();
        let refs: Vec<&[u8]> = keys.iter().map(<[u8; 32]>::as_slice).collect();
        let made =
            Decision::now("r", ScopeId::default(), DecisionOutcome::Missed).with_pages(&refs);
        assert_eq!((made.pages as usize, made.keys.len()), (refs.len(), DECISION_KEYS_MAX));
        assert_eq!(made.keys.iter().collect::<Vec<_>>(), refs[..DECISION_KEYS_MAX]);
        assert_eq!(made.clone().bounded(), made);
        assert!(made.bytes() > 32 * DECISION_KEYS_MAX);
        assert_eq!(made.without_keys().keys.len(), 0);
        let short = made.clone().with_pages(&[&[1; 7]]).bounded();
        assert_eq!((short.pages, short.keys.len()), (1, 0), "a key of 7 bytes is malformed");
        let mut many = made;
        many.keys = refs.iter().collect();
        assert_eq!(many.bounded().keys.len(), 0);
    }

    #[test]
    fn id_of_a_response_names_its_requests() {
        let made = |id: &str| Decision::now(id, ScopeId::default(), DecisionOutcome::Missed);
        let request = made("cmpl-1-0-5d41402a");
        for id in ["cmpl-1-0-5d41402a", "cmpl-1-0", "cmpl-1", "cmpl"] {
            assert!(request.matches_id(id), "{id}");
        }
        for id in ["", "cmpl-", "cmpl-1-", "cmpl-10", "mpl-1", "cmpl-1-0-5d41402a-1"] {
            assert!(!request.matches_id(id), "{id}");
        }
        let third = made("2_cmpl-1-0-5d41402a");
        for id in ["cmpl-1", "2_cmpl-1", "cmpl-1-0-5d41402a"] {
            assert!(third.matches_id(id), "{id}");
        }
        for id in ["2", "_cmpl-1", "1_cmpl-1"] {
            assert!(!third.matches_id(id), "{id}");
        }
        assert!(!made("a_cmpl-1").matches_id("cmpl-1"), "`a` is not a number");
    }

    #[test]
    fn every_outcome_is_parsed_from_its_word() {
        for (at, outcome) in DecisionOutcome::ALL.into_iter().enumerate() {
            assert_eq!(DecisionOutcome::parse(outcome.word()), Some(outcome));
            assert_eq!(outcome as usize, at);
        }
        assert_eq!(DecisionOutcome::parse("elsewhere"), None);
    }
}

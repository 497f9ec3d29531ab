//! The kinds of eviction policies.

use super::Eviction;
use super::adaptive::Adaptive;
use super::arc::AdaptiveReplacement;
use super::density::Density;
use super::eviction_policy::EvictionPolicy;
use super::fixed::FixedPolicy;
use super::lru::Lru;
use super::s3fifo::S3Fifo;
use super::two_q::TwoQ;
use ritornello_format::{Error, Result};

/// How victims are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// Least recently used first.
    Lru,
    /// Adaptive replacement: Megiddo and Modha, FAST '03.
    Arc,
    /// 2Q, a queue of new pages and a list of pages put again: Johnson and Shasha, VLDB '94.
    TwoQ,
    /// S3-FIFO, three queues (small, main, evicted keys): Yang et al., SOSP '23.
    S3Fifo,
    /// Fewest expected hits per unit of time first, learnt from the intervals between uses.
    Density,
    /// Evicts by the one of the policies above that had most hits recently in shadow caches, which
    /// simulate each policy on a sample of the pages. Changes the policy only for a lead above a
    /// margin.
    #[default]
    Adaptive,
}

impl PolicyKind {
    /// All policies.
    pub const ALL: [Self; 6] =
        [Self::Lru, Self::Arc, Self::TwoQ, Self::S3Fifo, Self::Density, Self::Adaptive];

    /// The name users type.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Arc => "arc",
            Self::TwoQ => "2q",
            Self::S3Fifo => "s3fifo",
            Self::Density => "density",
            Self::Adaptive => "adaptive",
        }
    }

    /// The policy with the name `word`; `None` if there is none.
    pub(crate) fn named(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|policy| policy.word() == word)
    }

    /// Reads the name users type.
    ///
    /// # Errors
    /// `Invalid` with the list of names if `word` is not a policy's name.
    pub fn parse(word: &str) -> Result<Self> {
        Self::named(word).ok_or_else(|| {
            let words = Self::ALL.map(|policy| format!("{:?}", policy.word())).join(", ");
            Error::invalid(format!("eviction is one of {words}")).with("given", word)
        })
    }

    /// Creates the policy without runs.
    #[must_use]
    pub fn build(self) -> Box<dyn Eviction> {
        let policy: Box<dyn EvictionPolicy> = match self {
            Self::Lru => Box::new(Lru::new()),
            Self::Arc => Box::new(AdaptiveReplacement::new()),
            Self::TwoQ => Box::new(TwoQ::new()),
            Self::S3Fifo => Box::new(S3Fifo::new()),
            Self::Density => Box::new(Density::new()),
            Self::Adaptive => return Box::new(Adaptive::new()),
        };
        Box::new(FixedPolicy::new(policy))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_names_parse_back() {
        for policy in PolicyKind::ALL {
            assert_eq!(PolicyKind::parse(policy.word()).unwrap(), policy);
            assert_eq!(policy.build().name(), policy.word());
            let followed = match policy {
                PolicyKind::Adaptive => PolicyKind::Density,
                fixed => fixed,
            };
            assert_eq!(policy.build().followed(), followed.word());
        }
        let error = PolicyKind::parse("mru").unwrap_err().to_string();
        assert!(error.contains("\"2q\"") && error.contains("mru"));
    }
}

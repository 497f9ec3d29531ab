//! Requests and responses. The order of variants and fields is the wire format: additions come
//! last.

use super::bounded;
use super::keys::{Keys, as_bytes, as_optional_bytes};
use super::types::{
    Committed, KeyListing, LeaseNumber, Leased, Located, PUT_PAGES_MAX, ReserveRequest, Reserved,
    ScopeListing, ScopeRef,
};
use crate::core::CapacityChange;
use crate::decision::{Decision, DecisionListing, REPORTED_DECISIONS_MAX, RequestExplanation};
use crate::directory::VOLUMES_MAX;
use crate::explanation::Explanation;
use crate::owner_silent::StoreReopening;
use crate::queue_lengths::REPORTED_QUEUES_MAX;
use crate::stats::CatalogStats;
use crate::transfer_counts::REPORTED_COUNTS_MAX;
use ritornello_format::{Error, ErrorKind, Scope, ScopeId, ScopeSettings, ScopeSlot};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::time::Duration;

/// A request. The method of [`Catalog`](super::Catalog) with the same name describes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are the parameters of the methods")]
pub enum Request<'a> {
    Resolve {
        scope: Cow<'a, Scope>,
        create: bool,
    },
    Probe {
        scope: ScopeRef,
        #[serde(borrow)]
        keys: Keys<'a>,
    },
    Lease {
        scopes: Cow<'a, [ScopeRef]>,
        #[serde(borrow)]
        keys: Keys<'a>,
        ttl: Duration,
    },
    Release {
        lease: LeaseNumber,
    },
    BeginRead {
        scope: ScopeRef,
        #[serde(borrow)]
        keys: Keys<'a>,
    },
    Exists {
        scope: ScopeRef,
        #[serde(borrow)]
        keys: Keys<'a>,
    },
    Reserve {
        scope: ScopeRef,
        #[serde(borrow)]
        keys: Keys<'a>,
        #[serde(borrow, serialize_with = "as_optional_bytes")]
        parent: Option<&'a [u8]>,
        reserve_request: Cow<'a, ReserveRequest>,
    },
    Commit {
        reservation: u64,
        #[serde(deserialize_with = "bounded::list::<Option<u64>, _, _, PUT_PAGES_MAX>")]
        written: Cow<'a, [Option<u64>]>,
    },
    Abort {
        reservation: u64,
    },
    ReportDamage {
        scope: ScopeRef,
        #[serde(borrow, serialize_with = "as_bytes")]
        key: &'a [u8],
        generation: u64,
        #[serde(borrow)]
        reason: &'a str,
    },
    Touch {
        scope: ScopeRef,
        #[serde(borrow)]
        keys: Keys<'a>,
    },
    Delete {
        scope: ScopeRef,
        #[serde(borrow)]
        keys: Keys<'a>,
    },
    DropScope {
        scope: ScopeRef,
    },
    Configure {
        scope: ScopeRef,
        settings: ScopeSettings,
    },
    Scopes {
        from: ScopeSlot,
    },
    Keys {
        scope: ScopeRef,
        after: u64,
        limit: u32,
    },
    ChangeCapacity {
        change: Cow<'a, CapacityChange>,
    },
    Clear,
    Flush,
    Stats,
    ReportSpeeds {
        #[serde(deserialize_with = "bounded::list::<u32, _, _, VOLUMES_MAX>")]
        speeds: Cow<'a, [u32]>,
    },
    ReportFailedWrites {
        reservation: u64,
        #[serde(deserialize_with = "bounded::list::<u8, _, _, VOLUMES_MAX>")]
        volumes: Cow<'a, [u8]>,
    },
    ReportTransfers {
        #[serde(deserialize_with = "bounded::list::<u64, _, _, REPORTED_COUNTS_MAX>")]
        counts: Cow<'a, [u64]>,
    },
    Explain {
        id: ScopeId,
        scope: Option<Cow<'a, Scope>>,
        #[serde(borrow)]
        keys: Keys<'a>,
    },
    ReportDecisions {
        #[serde(deserialize_with = "bounded::list::<Decision, _, _, REPORTED_DECISIONS_MAX>")]
        decisions: Cow<'a, [Decision]>,
        dropped: u64,
    },
    Decisions {
        limit: u32,
    },
    ExplainRequest {
        #[serde(borrow)]
        request: &'a str,
    },
    ReportQueues {
        #[serde(deserialize_with = "bounded::list::<u64, _, _, REPORTED_QUEUES_MAX>")]
        lengths: Cow<'a, [u64]>,
    },
}

impl<'a> Request<'a> {
    /// The keys of the pages that the request concerns; `None` for a request without a list of
    /// keys.
    #[must_use]
    pub fn keys(&self) -> Option<Keys<'a>> {
        match self {
            Self::Probe { keys, .. }
            | Self::Lease { keys, .. }
            | Self::BeginRead { keys, .. }
            | Self::Exists { keys, .. }
            | Self::Reserve { keys, .. }
            | Self::Touch { keys, .. }
            | Self::Delete { keys, .. }
            | Self::Explain { keys, .. } => Some(*keys),
            _ => None,
        }
    }
}

/// A response.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Response {
    /// Answers `Resolve`.
    Scope(Option<ScopeRef>),
    /// Answers `Probe`, `Touch` and `Delete`: a number of pages.
    Count(usize),
    /// Answers `Lease`.
    Leased(Leased),
    /// Answers `BeginRead`.
    Located(Located),
    /// Answers `Exists`.
    Exists(Vec<bool>),
    /// Answers `Reserve`.
    Reserved(Reserved),
    /// Answers `Commit`.
    Committed(Committed),
    /// Answers `Scopes`.
    Scopes(Vec<ScopeListing>),
    /// Answers `Keys`.
    Keys(KeyListing),
    /// Answers requests that have no other response.
    Done,
    /// Answers `Stats`.
    Stats(Box<CatalogStats>),
    /// The call failed. This response exists on sockets only.
    Failed(WireError),
    /// Answers `Explain`.
    Explained(Explanation),
    /// Answers `Decisions`.
    Decisions(DecisionListing),
    /// Answers `ExplainRequest`.
    RequestExplained(RequestExplanation),
}

/// An error on the wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireError {
    kind: Kind,
    text: String,
}

/// [`ErrorKind`] on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Kind {
    Invalid,
    Retry,
    Miss,
    Fatal,
    Closed,
}

impl WireError {
    /// The wire form of `error`.
    #[must_use]
    pub fn about(error: &Error) -> Self {
        let kind = match error.kind() {
            ErrorKind::Invalid => Kind::Invalid,
            ErrorKind::Retry => Kind::Retry,
            ErrorKind::Miss => Kind::Miss,
            ErrorKind::Fatal => Kind::Fatal,
            ErrorKind::Closed => Kind::Closed,
        };
        Self { kind, text: error.to_string() }
    }

    /// Whether the error says that the owner is closing.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.kind == Kind::Closed
    }

    /// Returns the error for a connection that the owner refused with this answer. The kind `Miss`
    /// means that the owner is reopening the store.
    #[must_use]
    pub fn refusal(self) -> Error {
        if self.kind == Kind::Miss { StoreReopening::error(&self.text) } else { self.into() }
    }
}

impl From<Error> for WireError {
    fn from(error: Error) -> Self {
        Self::about(&error)
    }
}

impl From<WireError> for Error {
    fn from(fault: WireError) -> Self {
        let kind = match fault.kind {
            Kind::Invalid => ErrorKind::Invalid,
            Kind::Retry => ErrorKind::Retry,
            Kind::Miss => ErrorKind::Miss,
            Kind::Fatal => ErrorKind::Fatal,
            Kind::Closed => ErrorKind::Closed,
        };
        Self::new(kind, fault.text)
    }
}

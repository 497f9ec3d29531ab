//! Roles, and the role that a request requires by its method and path.

use axum::http::Method;

/// The path of requests that ask why pages are hits or misses.
pub(crate) const EXPLAIN: &str = "/v1/explain";
/// The path of the decisions about requests.
pub(crate) const DECISIONS: &str = "/v1/decisions";

/// The permission to use the service. Each role includes the permissions of the roles before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Reads health, metrics, statistics, configuration and decisions, and asks why pages are hits
    /// or misses.
    Read,
    /// Looks up pages, makes puts durable, and verifies pages, which removes damaged pages.
    Operate,
    /// Changes settings and drops pages.
    Admin,
}

impl Role {
    const ALL: [Self; 3] = [Self::Read, Self::Operate, Self::Admin];

    /// The role in one word, as in the token file.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Operate => "operate",
            Self::Admin => "admin",
        }
    }

    /// Parses the word of a role.
    pub(crate) fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.word() == word)
    }

    /// The role that a request requires. A route that changes settings or drops intact pages must
    /// use a method besides GET, HEAD, OPTIONS and POST.
    pub(crate) fn required_by(method: &Method, path: &str) -> Self {
        match *method {
            Method::GET | Method::HEAD | Method::OPTIONS => Self::Read,
            // The route `/v1/explain` only reads: it changes no page, and counts as no lookup. Its
            // method is POST, because the keys do not fit a path.
            Method::POST if path == EXPLAIN => Self::Read,
            Method::POST => Self::Operate,
            _ => Self::Admin,
        }
    }
}

//! The limits of the service.

use std::time::Duration;

/// Maximum number of stores of a service.
pub(crate) const STORES_MAX: usize = 64;

/// Maximum number of connections. A further connection displaces the oldest connection that answers
/// no request; if there is none, the further connection waits.
pub(crate) const CONNECTIONS_MAX: usize = 64;
/// Maximum time for the headers of a request, which is also the maximum time between two requests
/// of a connection.
pub(crate) const HEADERS_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time of a TLS handshake.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time between two checks whether the files of the tokens and of the certificate changed.
pub(crate) const FILES_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum bytes of the headers of a request.
pub(crate) const HEADERS_BYTES_MAX: usize = 16 << 10;
/// Maximum number of headers of a request.
pub(crate) const HEADERS_MAX: usize = 64;
/// Age at which a connection is closed after its current request.
pub(crate) const CONNECTION_AGE: Duration = Duration::from_secs(60);
/// Maximum time of a connection after the service is told to stop. A connection older than
/// [`CONNECTION_AGE`] has this time in addition to [`REQUEST_TIMEOUT`], for a client that reads its
/// answer slowly.
pub(crate) const CONNECTION_GRACE: Duration = Duration::from_secs(5);

/// Maximum bytes of the body of a request.
pub(crate) const BODY_BYTES_MAX: usize = 1 << 20;
/// Maximum time of a request, from its headers to the headers of its answer.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// Sustained rate of requests that are served, per second: for each token of the token file, and
/// for all senders without such a token together. Requests for `/livez` and `/readyz` are not
/// limited.
pub(crate) const REQUESTS_PER_SECOND: u32 = 100;
/// Maximum number of requests that are served immediately after a pause: the size of the bucket of
/// [`RateLimit`](crate::rate::RateLimit).
pub(crate) const REQUESTS_BURST: u32 = 200;

/// Maximum time that a request waits for an observation.
pub(crate) const OBSERVATION_TIMEOUT: Duration = Duration::from_secs(5);
/// Time after which an observation that hangs is abandoned. Doubles with each abandoned observation
/// of the same store that still hangs.
pub(crate) const OBSERVATION_ABANDONED: Duration = Duration::from_secs(60);
/// Maximum number of abandoned observations of a store, which each hold a thread.
pub(crate) const ABANDONED_MAX: u32 = 12;
/// Time after the end of an observation during which requests are answered from it.
pub(crate) const OBSERVATION_SHARED: Duration = Duration::from_secs(1);

/// Maximum number of searches for the drives of a store's directories at the same time. Each search
/// after the first begins while the earlier searches hang.
pub(crate) const SEARCHES_MAX: usize = 4;

/// Maximum number of calls to a store that run at the same time, besides its observations, the
/// searches for its drives and its scrub.
pub(crate) const CALLS_MAX: usize = 8;
/// Maximum time of a question to the owner of a store that the service does not have open.
/// Observations of the store wait until the question ends, so this time must be well below
/// [`OBSERVATION_TIMEOUT`]: otherwise one slow answer would make `/readyz` fail.
pub(crate) const QUESTION_TIMEOUT: Duration = Duration::from_secs(4);
const _: () = assert!(QUESTION_TIMEOUT.as_millis() < OBSERVATION_TIMEOUT.as_millis());
/// Maximum number of keys in a request to `/v1/probe` or `/v1/explain`.
pub(crate) const KEYS_MAX: usize = 4096;
const _: () = assert!(KEYS_MAX <= ritornello_store::EXPLAINED_KEYS_MAX);
/// Maximum number of decisions in an answer.
pub(crate) const DECISIONS_MAX: u32 = 1024;
const _: () = assert!(DECISIONS_MAX as usize <= ritornello_store::LISTED_DECISIONS_MAX);
/// Number of decisions in an answer to a request without `limit`.
pub(crate) const DECISIONS_DEFAULT: u32 = 100;

/// Maximum number of scopes in an answer, and of scopes with separate series in the metrics:
/// all further scopes share the label value `other`.
pub(crate) const SCOPES_MAX: usize = 16;
/// Maximum characters of a label value.
pub(crate) const LABEL_CHARS_MAX: usize = 128;

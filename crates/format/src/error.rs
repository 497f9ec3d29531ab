//! The error type that all crates share: a kind that selects the caller's reaction, a sentence, and
//! context.

use std::error::Error as StdError;
use std::fmt;

/// Classes of errors by the caller's reaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The call cannot succeed as it was made, for example because of an argument, a setting, or
    /// the version of a file. The message names the remedy, if one is known.
    Invalid,
    /// The call failed for now: the same call may succeed later.
    Retry,
    /// The requested bytes are not available. Compute them.
    Miss,
    /// The object that returned the error, or that the call was to open (a store, an index), cannot
    /// be used. The message names the steps that must come before its next opening, if any are
    /// known.
    Fatal,
    /// The object that was called was closed, or was opened by the process from which this process
    /// was forked.
    Closed,
}

impl ErrorKind {
    /// The kind in one lower-case word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::Retry => "retry",
            Self::Miss => "miss",
            Self::Fatal => "fatal",
            Self::Closed => "closed",
        }
    }
}

/// An error: kind, message (with a remedy if known), context and cause.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    message: String,
    context: Vec<(&'static str, String)>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// A result whose error is an [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of `kind`. Shortcuts: [`Error::invalid`], [`Error::retry`], [`Error::miss`],
    /// [`Error::fatal`].
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner { kind, message: message.into(), context: Vec::new(), source: None }))
    }

    /// See [`ErrorKind::Invalid`].
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// See [`ErrorKind::Retry`].
    pub fn retry(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Retry, message)
    }

    /// See [`ErrorKind::Miss`].
    pub fn miss(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Miss, message)
    }

    /// See [`ErrorKind::Fatal`].
    pub fn fatal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Fatal, message)
    }

    /// Adds one key/value pair of context, unless the error carries the same pair already.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl fmt::Display) -> Self {
        let pair = (key, value.to_string());
        if !self.0.context.contains(&pair) {
            self.0.context.push(pair);
        }
        self
    }

    /// Sets the cause, and replaces a cause that was set before.
    #[must_use]
    pub fn because(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// The kind, which selects the caller's reaction.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The message, without context and cause.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)?;
        for (at, (key, value)) in self.0.context.iter().enumerate() {
            write!(f, "{}{key}={value}", if at == 0 { " [" } else { ", " })?;
        }
        if !self.0.context.is_empty() {
            f.write_str("]")?;
        }
        if let Some(source) = &self.0.source {
            write!(f, ": {source}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {self}", self.0.kind.word())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_ref().map(|source| &**source as &(dyn StdError + 'static))
    }
}

/// Converts a failed system call to a `Retry`. Code that knows that a retry cannot succeed makes an
/// error of another kind instead.
impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Self::retry("a call of the file system failed").because(error)
    }
}

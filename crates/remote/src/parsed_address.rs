//! The address of a remote: `SCHEME://AUTHORITY/PATH?OPTION=VALUE&...`, or `SCHEME:PATH?...`.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use ritornello_format::{Error, Result};
use ritornello_tiers::remote::RemoteAddress;
use std::fmt;

/// Characters that clients encode in URLs: all except the unreserved characters of RFC 3986,
/// section 2.3.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Options whose values are locations. [`ParsedAddress::redact`] keeps these values, because they
/// are not secret.
const PUBLIC_OPTIONS: [&str; 4] = ["master", "host", "port", "region"];

/// A parsed address. Each scheme interprets the parts.
#[derive(Clone, PartialEq, Eq)]
pub struct ParsedAddress {
    /// `s3`, `gs`, `az`, `file`, `memory`, or the module of a registered backend.
    pub scheme: String,
    /// The text between `//` and the next `/`: the bucket. Empty in a valid address of the scheme
    /// `file`.
    pub authority: String,
    /// The text after the authority, without surrounding slashes (except for `file`, whose paths
    /// are absolute).
    pub path: String,
    /// The options, in order.
    pub options: Vec<(String, String)>,
}

impl ParsedAddress {
    /// Parses `text`.
    ///
    /// # Errors
    /// `Invalid` if `text` has no scheme, if its authority has an `@` or a colon, if an option has
    /// no `=`, or if a decoded part is not UTF-8. Errors quote no option, because an option may be
    /// a secret.
    pub fn parse(text: &str) -> Result<Self> {
        let (front, query) = text.split_once('?').unwrap_or((text, ""));
        let (scheme, rest) = front.split_once(':').filter(|(scheme, _)| !scheme.is_empty()).ok_or_else(|| {
            Error::invalid("a remote's address begins with a scheme, as in s3://bucket/prefix or file:///dir")
                .with("address", RemoteAddress::shown(text))
        })?;
        let (authority, path) = match rest.strip_prefix("//") {
            Some(rest) => rest.split_once('/').unwrap_or((rest, "")),
            None => ("", rest),
        };
        // A bucket's name has no colon, so text after a colon is a password, which may contain a
        // slash.
        if authority.contains(['@', ':']) {
            return Err(Error::invalid(
                "an address must have no user and no password: credentials come from the environment",
            )
            .with("address", RemoteAddress::shown(text)));
        }
        let path =
            if scheme == "file" { format!("/{path}") } else { path.trim_matches('/').to_owned() };
        let option = |pair: &str| {
            let (name, value) = pair.split_once('=').ok_or_else(|| {
                Error::invalid(
                    "write an option of an address as NAME=VALUE, with %26 for & in VALUE",
                )
                .with("address", RemoteAddress::shown(text))
            })?;
            Ok((name.to_owned(), decoded(value)?))
        };
        let options = query.split('&').filter(|pair| !pair.is_empty()).map(option);
        Ok(Self {
            scheme: scheme.to_owned(),
            authority: decoded(authority)?,
            path: decoded(&path)?,
            options: options.collect::<Result<_>>()?,
        })
    }

    /// Removes the option `name` and returns its value, if present.
    pub fn take(&mut self, name: &str) -> Option<String> {
        let at = self.options.iter().position(|(known, _)| known == name)?;
        Some(self.options.remove(at).1)
    }

    /// Returns `text`, a message of a backend, with `…` in place of the values of this address's
    /// options. Values shorter than four bytes, and the values of `master`, `host`, `port` and
    /// `region`, count as not secret and stay.
    #[must_use]
    pub fn redact(&self, text: &str) -> String {
        let hidden = |(name, value): &&(String, String)| {
            value.len() >= 4 && !PUBLIC_OPTIONS.contains(&name.as_str())
        };
        let values = self.options.iter().filter(hidden);
        let mut forms: Vec<String> = values.flat_map(|(_, value)| forms(value)).collect();
        // Replace the longest form first, because a value may be part of a longer value.
        forms.sort_unstable_by_key(|form| std::cmp::Reverse(form.len()));
        forms.iter().fold(text.to_owned(), |text, form| text.replace(form, "…"))
    }

    /// Checks that every option of the address was taken, see [`ParsedAddress::take`].
    ///
    /// # Errors
    /// `Invalid` if an option is left. The error lists the options in `known`.
    pub fn finish(&self, known: &str) -> Result<()> {
        match self.options.first() {
            None => Ok(()),
            Some((name, _)) => Err(Error::invalid(format!(
                "remotes of the scheme {} do not have this option: use {known}",
                self.scheme
            ))
            .with("option", name)),
        }
    }
}

/// The forms in which a message may contain `value`: unchanged, percent-encoded as in URLs (three
/// variants), and escaped as in Python's `repr`.
fn forms(value: &str) -> [String; 5] {
    let encoded = utf8_percent_encode(value, ENCODED).to_string();
    let (slashes, plus) = (encoded.replace("%2F", "/"), encoded.replace("%20", "+"));
    let escaped = value.replace('\\', r"\\").replace('\'', r"\'");
    [value.to_owned(), encoded, slashes, plus, escaped]
}

fn decoded(text: &str) -> Result<String> {
    let text = percent_decode_str(text).decode_utf8();
    text.map(Into::into).map_err(|error| Error::invalid("an address must be UTF-8").because(error))
}

/// Omits the options, which may hold secrets.
impl fmt::Display for ParsedAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slash = if self.authority.is_empty() || self.path.is_empty() { "" } else { "/" };
        let slashes = if self.scheme == "file" || !self.authority.is_empty() { "//" } else { "" };
        write!(f, "{}:{slashes}{}{slash}{}", self.scheme, self.authority, self.path)
    }
}

impl fmt::Debug for ParsedAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn addresses_are_parsed() {
        let address =
            ParsedAddress::parse("s3://bucket/a/b/?endpoint=http%3A%2F%2Fh:1&style=path").unwrap();
        assert_eq!((address.scheme.as_str(), address.authority.as_str()), ("s3", "bucket"));
        assert_eq!(address.path, "a/b");
        assert_eq!(address.options[0], ("endpoint".into(), "http://h:1".into()));
        assert_eq!(address.to_string(), "s3://bucket/a/b");
        let address = ParsedAddress::parse("file:///mnt/kv").unwrap();
        assert_eq!((address.authority.as_str(), address.path.as_str()), ("", "/mnt/kv"));
        assert_eq!(address.to_string(), "file:///mnt/kv");
        let address = ParsedAddress::parse("a.b:Class?x=1%202").unwrap();
        assert_eq!((address.scheme.as_str(), address.path.as_str()), ("a.b", "Class"));
        assert_eq!(address.options, [("x".to_owned(), "1 2".to_owned())]);
        assert_eq!(address.to_string(), "a.b:Class");
        assert_eq!(ParsedAddress::parse("memory:").unwrap().to_string(), "memory:");
    }

    #[test]
    fn invalid_addresses_are_refused() {
        for text in ["", "bucket", "://x", "s3://b?endpoint", "s3://b/%ff"] {
            assert!(ParsedAddress::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn errors_quote_no_option_or_password() {
        for text in [
            "no-scheme?password=hunter2",
            "s3://b?hunter2",
            "s3://b?password=hunter2&hunter2",
            "s3://me:hunter2@b",
            "s3://b?password=hunter2%ff",
        ] {
            let error = ParsedAddress::parse(text).unwrap_err().to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
        let address = ParsedAddress::parse("m:C?password=hunter2&more=hunter23&n=12").unwrap();
        assert_eq!(address.redact("no hunter23, no hunter2, but 12"), "no …, no …, but 12");
        assert!(!format!("{address:?}").contains("hunter2"));
        let address = ParsedAddress::parse("m:C?password=p%40s%2Fw'o%20rd").unwrap();
        let text = r"p@s/w'o rd p%40s%2Fw%27o%20rd p%40s/w%27o%20rd p%40s%2Fw%27o+rd p@s/w\'o rd";
        assert_eq!(address.redact(text), "… … … … …");
        let address = ParsedAddress::parse("m:C?master=127.0.0.1:50051&password=hunter2").unwrap();
        let text = "127.0.0.1:50051 refuses hunter2";
        assert_eq!(address.redact(text), "127.0.0.1:50051 refuses …");
        for text in ["s3://me:hun/ter2@bucket", "s3://me:hunter2", "s3://me@bucket"] {
            let error = ParsedAddress::parse(text).unwrap_err().to_string();
            assert!(error.contains("no user") && !error.contains("ter2"), "{error}");
        }
    }

    #[test]
    fn unknown_option_is_named() {
        let mut address = ParsedAddress::parse("s3://b?region=x&regoin=y").unwrap();
        assert_eq!(address.take("region").as_deref(), Some("x"));
        let error = address.finish("region").unwrap_err().to_string();
        assert!(error.contains("regoin") && !error.contains("=y"), "{error}");
    }
}

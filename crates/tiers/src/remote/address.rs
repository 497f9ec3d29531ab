//! The address of a remote: text that may hold secrets.

use serde::{Serialize, Serializer};
use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

/// An address as the user typed it. Options and user info may be secrets (`?password=...`).
/// Printing an address omits them; only [`RemoteAddress::expose`] returns them.
#[derive(Clone, PartialEq, Eq)]
pub struct RemoteAddress(String);

impl RemoteAddress {
    /// The address with its options, for the code that opens it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// `text` up to its first option and without user info; `…` replaces the options. If the part
    /// between the scheme and the next slash contains a colon, which may begin a password, `…`
    /// replaces everything after the scheme.
    #[must_use]
    pub fn shown(text: &str) -> String {
        let (front, options) = match text.split_once('?') {
            Some((front, _)) => (front, "?…"),
            None => (text, ""),
        };
        let Some((scheme, rest)) = front.split_once("://") else {
            let user = front.rfind('@').map_or(0, |at| at + 1);
            return format!("{}{options}", &front[user..]);
        };
        let place = rest.split('/').next().unwrap_or_default();
        if place.contains(':') {
            // A password after the colon may contain `/` and `?`, so its end is unknown.
            return format!("{scheme}://…");
        }
        let user = place.rfind('@').map_or(0, |at| at + 1);
        format!("{scheme}://{}{options}", &rest[user..])
    }
}

impl From<&str> for RemoteAddress {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl FromStr for RemoteAddress {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(text.into())
    }
}

impl fmt::Display for RemoteAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&Self::shown(&self.0))
    }
}

impl fmt::Debug for RemoteAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for RemoteAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_and_user_info_are_never_shown() {
        for (text, shown) in [
            ("s3://bucket/prefix?password=hunter2&x=1", "s3://bucket/prefix?…"),
            ("s3://me@bucket/a@b", "s3://bucket/a@b"),
            ("s3://me:hunter2@bucket/a@b", "s3://…"),
            ("redis://me:hun@ter2@host", "redis://…"),
            ("my.module:Class?password=hunter2", "my.module:Class?…"),
            ("s3://me:hun/ter2@bucket", "s3://…"),
            ("s3://me:hun?ter2@bucket", "s3://…"),
            ("me:hunter2@host", "host"),
            ("file:///mnt/a@b", "file:///mnt/a@b"),
            ("file:///mnt/a:b@c", "file:///mnt/a:b@c"),
            ("no address?password=hunter2 write=none", "no address?…"),
            ("memory:", "memory:"),
            ("", ""),
        ] {
            let address = RemoteAddress::from(text);
            assert_eq!(address.to_string(), shown);
            assert_eq!((format!("{address:?}").as_str(), address.expose()), (shown, text));
        }
    }
}

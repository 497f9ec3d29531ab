//! Detects endpoints whose requests cross a network without TLS, so that other machines could read
//! the requests.

use ritornello_format::{Error, Result};
use std::net::IpAddr;

/// Splits an endpoint into its scheme, `http` or `https`, and its host, port and path.
///
/// # Errors
/// `Invalid` if the scheme is neither `http` nor `https`, or the host is empty.
pub(crate) fn split_endpoint(endpoint: &str) -> Result<(&str, &str)> {
    endpoint
        .split_once("://")
        .filter(|(scheme, host)| matches!(*scheme, "http" | "https") && !host.is_empty())
        .ok_or_else(|| {
            Error::invalid("an endpoint begins with https://, or with http:// to do without TLS")
        })
}

/// Whether requests to `endpoint` leave this machine without TLS. `false` for an invalid endpoint.
pub(crate) fn is_readable(endpoint: &str) -> bool {
    split_endpoint(endpoint).is_ok_and(|(scheme, rest)| scheme == "http" && !is_loopback(rest))
}

/// Whether the host in `rest`, which has the form `USER@HOST:PORT/PATH`, is this machine.
fn is_loopback(rest: &str) -> bool {
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let host = authority.rsplit('@').next().unwrap_or_default();
    let host = match host.strip_prefix('[').and_then(|host| host.split_once(']')) {
        Some((host, _)) => host,
        None => host.split(':').next().unwrap_or_default(),
    };
    let host = host.trim_end_matches('.').to_ascii_lowercase();
    host == "localhost"
        || host.ends_with(".localhost")
        || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_http_to_other_machines_is_detected() {
        for endpoint in [
            "http://minio:9000",
            "http://10.0.0.7",
            "http://localhost.evil.example",
            "http://127.0.0.1@evil.example",
            "http://[2001:db8::1]:9000/x",
        ] {
            assert!(is_readable(endpoint), "{endpoint}");
        }
        for endpoint in [
            "https://minio:9000",
            "http://localhost:9000",
            "http://bucket.localhost",
            "http://127.0.0.1",
            "http://127.8.8.8:80/account",
            "http://[::1]:9000",
            "nothing",
        ] {
            assert!(!is_readable(endpoint), "{endpoint}");
        }
    }
}

//! The check of the Host header.
//!
//! A browser sends requests of any web page to any address. If the owner of a web site makes the
//! site's host name resolve to this machine (DNS rebinding), the site's pages have the same origin
//! as the service and could read its answers. The Host header of their requests is the site's name.

use crate::problem::Problem;
use axum::http::{HeaderMap, StatusCode, Uri, header, uri::Authority};
use std::net::{IpAddr, SocketAddr};

/// The host name by which a client reaches its own machine.
const LOOPBACK_NAME: &str = "localhost";

/// Names and addresses under which clients may reach the service, besides `localhost` and the
/// address to which a connection was made.
#[derive(Debug)]
pub(crate) struct Hosts {
    further: Vec<String>,
    /// The port that a Host header without a port means.
    default_port: u16,
}

impl Hosts {
    /// `further` are the host names and addresses from the service's settings; `has_tls`: clients
    /// reach the service by the scheme `https`, whose default port is 443 instead of 80.
    pub(crate) fn new(further: &[String], has_tls: bool) -> Self {
        let default_port = if has_tls { 443 } else { 80 };
        Self { further: further.iter().map(|name| bare(name).to_owned()).collect(), default_port }
    }

    /// Checks that the request names the service. `local` is the address at which the request
    /// arrived. Valid are `localhost`, the IP address of `local` and, if this is a loopback
    /// address, any loopback address, each with the port of `local`, which may be omitted if it is
    /// the scheme's default port; and the names of the settings with any port, because a proxy or a
    /// translated address may have another port.
    ///
    /// # Errors
    /// 400 without exactly one valid Host header; 421 if this header, or an authority in the
    /// request's target, does not name this service.
    pub(crate) fn check(
        &self,
        headers: &HeaderMap,
        uri: &Uri,
        local: SocketAddr,
    ) -> Result<(), Problem> {
        let mut hosts = headers.get_all(header::HOST).iter();
        let (Some(host), None) = (hosts.next(), hosts.next()) else {
            return Err(Problem::invalid("the request must have one Host header"));
        };
        let host = host.to_str().ok().and_then(|host| host.parse::<Authority>().ok());
        let Some(host) = host else {
            return Err(Problem::invalid("the Host header is not a host with an optional port"));
        };
        let is_ours = |authority| self.is_ours(authority, local);
        if is_ours(&host) && uri.authority().is_none_or(is_ours) {
            return Ok(());
        }
        Err(Problem::new(
            StatusCode::MISDIRECTED_REQUEST,
            "invalid",
            "the Host header does not name this service: use localhost or the service's address, \
             or start the service with --http-host NAME",
        ))
    }

    fn is_ours(&self, authority: &Authority, local: SocketAddr) -> bool {
        if authority.as_str().contains('@') {
            return false;
        }
        let host = bare(authority.host());
        if self.further.iter().any(|name| name.eq_ignore_ascii_case(host)) {
            return true;
        }
        if authority.port_u16().unwrap_or(self.default_port) != local.port()
            || (authority.port().is_none() && authority.as_str().ends_with(':'))
        {
            return false;
        }
        match host.parse::<IpAddr>() {
            Ok(ip) => {
                let ip = ip.to_canonical();
                ip == local.ip().to_canonical() || (ip.is_loopback() && local.ip().is_loopback())
            }
            Err(_) => host.eq_ignore_ascii_case(LOOPBACK_NAME),
        }
    }
}

/// Whether `name` can be compared with the host of a request: a name or an address, without scheme
/// and port.
pub(crate) fn is_host(name: &str) -> bool {
    let is_legal = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let name = bare(name);
    name.parse::<IpAddr>().is_ok() || (!name.is_empty() && name.bytes().all(is_legal))
}

/// The host without the brackets of an IPv6 address.
fn bare(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn status(hosts: &[&str], uri: &str) -> Result<(), String> {
        let mut headers = HeaderMap::new();
        for host in hosts {
            headers.append(header::HOST, HeaderValue::from_str(host).unwrap());
        }
        let local = "127.0.0.1:7007".parse().unwrap();
        let names = ["node-3.cluster", "10.0.0.7", "[fd00::7]"];
        let hosts = Hosts::new(&names.map(str::to_owned), false);
        hosts.check(&headers, &uri.parse().unwrap(), local).map_err(|p| p.message().to_owned())
    }

    #[test]
    fn only_names_of_the_service_pass() {
        for host in ["localhost:7007", "LOCALHOST:7007", "127.0.0.1:7007", "[::1]:7007"] {
            assert_eq!(status(&[host], "/"), Ok(()), "{host}");
        }
        for host in
            ["node-3.cluster:7007", "Node-3.cluster", "node-3.cluster:443", "10.0.0.7:30007"]
        {
            assert_eq!(status(&[host], "/"), Ok(()), "{host}");
        }
        assert_eq!(status(&["[fd00::7]:7007"], "/"), Ok(()));
        for host in [
            "evil.example:7007",
            "127.0.0.1.evil.example:7007",
            "localhost.evil.example:7007",
            "localhost",
            "localhost:",
            "localhost:7008",
            "10.0.0.1:7007",
            "user@localhost:7007",
            "user@node-3.cluster:7007",
            "node-3.cluster.evil.example",
            "[fd00::8]:7007",
            "0:7007",
        ] {
            assert!(status(&[host], "/").is_err(), "{host}");
        }
    }

    #[test]
    fn default_port_is_that_of_the_scheme() {
        for (has_tls, port, is_ours) in
            [(false, 80, true), (false, 443, false), (true, 443, true), (true, 80, false)]
        {
            let mut headers = HeaderMap::new();
            headers.append(header::HOST, HeaderValue::from_static("localhost"));
            let local = SocketAddr::from(([127, 0, 0, 1], port));
            let found = Hosts::new(&[], has_tls).check(&headers, &"/".parse().unwrap(), local);
            assert_eq!(found.is_ok(), is_ours, "{has_tls} {port}");
        }
    }

    #[test]
    fn hosts_have_no_scheme_and_no_port() {
        for name in ["node-3", "node_3.cluster.", "10.0.0.7", "fd00::7", "[fd00::7]"] {
            assert!(is_host(name), "{name}");
        }
        for name in ["", "[]", "*", "node-3:7007", "http://node-3", "a b", "a/b", "user@node-3"] {
            assert!(!is_host(name), "{name}");
        }
    }

    #[test]
    fn target_with_another_host_is_refused() {
        assert_eq!(status(&["localhost:7007"], "http://localhost:7007/livez"), Ok(()));
        assert!(status(&["localhost:7007"], "http://evil.example:7007/livez").is_err());
    }

    #[test]
    fn one_host_header_is_required() {
        assert!(status(&[], "/").unwrap_err().contains("one Host header"));
        assert!(status(&["localhost:7007", "localhost:7007"], "/").is_err());
        assert!(status(&["a b"], "/").unwrap_err().contains("not a host"));
    }
}

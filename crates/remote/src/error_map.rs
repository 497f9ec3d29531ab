//! Maps errors of servers and clients to error kinds: `Retry` if a retry can succeed, else `Fatal`
//! with advice.

use object_store::Error as ClientError;
use ritornello_format::{Error, ErrorKind};

/// Maximum characters of a server's message that an error quotes: some servers answer with long
/// documents.
const MESSAGE_CHARS_MAX: usize = 400;

/// Advice by patterns in an error: codes of S3, GCS, Azure and VersityGW, and the client's own
/// messages.
const ADVICE: [(&[&str], &str); 6] = [
    (
        &["NoSuchBucket", "ContainerNotFound", "bucket does not exist"],
        "the bucket does not exist: make it, or correct the address",
    ),
    (
        &["RequestTimeTooSkewed", "RequestTimeSkewed"],
        "the clock of this machine or of the server is wrong: set it, with NTP for instance",
    ),
    (
        &[
            "InvalidAccessKeyId",
            "SignatureDoesNotMatch",
            "AuthenticationFailed",
            "ExpiredToken",
            "InvalidToken",
            "AuthenticationRequired",
            "InvalidAuthenticationInfo",
            // VersityGW's code for an unknown key.
            "XAdminUserNotFound",
        ],
        "the credentials are wrong or have expired: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY \
         (or the profile, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_KEY)",
    ),
    (
        // A client without configured credentials requests credentials from the cloud's metadata
        // service, at one of these addresses.
        &["169.254.169.254", "169.254.170.2", "metadata.google.internal"],
        "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile \
         (GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_KEY), or add ?anonymous=true",
    ),
    (
        &["AuthorizationHeaderMalformed", "PermanentRedirect", "redirect without LOCATION"],
        "the bucket is in another region: add ?region=REGION to the address",
    ),
    (
        &["UnknownIssuer", "invalid peer certificate", "certificate verify failed"],
        "the server's certificate is not trusted: name the certificate of its authority in \
         SSL_CERT_FILE",
    ),
];

/// Whether the error means that the bucket exists, and the object does not exist or is archived. A
/// 404 answer without a body counts as a missing object, because answers to existence queries have
/// no body. In an answer with a body, the error code must name a missing object.
pub(crate) fn is_not_found(error: &ClientError) -> bool {
    // An archived object counts as missing, because it cannot be read within any deadline.
    if contains_any(&error.to_string(), &["<Code>InvalidObjectState</Code>"]) {
        return true;
    }
    if !matches!(error, ClientError::NotFound { .. }) {
        return false;
    }
    let text = error.to_string();
    let answer = text.split_once("status code: ").and_then(|(_, rest)| rest.split_once(':'));
    let body = answer.map_or("", |(_, body)| body.trim());
    body.is_empty() || contains_any(body, &["<Code>NoSuchKey</Code>", "<Code>BlobNotFound</Code>"])
}

/// Whether the error means that the requested range begins at or after the end of the object.
pub(crate) fn is_range_past_end(error: &ClientError) -> bool {
    status(&error.to_string()) == Some(416)
}

/// Converts an error of the client: to `Retry` if a retry may help, otherwise to `Fatal` with
/// advice.
pub(crate) fn to_error(error: ClientError, remote: &str) -> Error {
    let text = error.to_string();
    let advice =
        ADVICE.iter().find(|(words, _)| contains_any(&text, words)).map(|(_, advice)| *advice);
    let (kind, message) = match (advice, &error, status(&text)) {
        (Some(advice), ..) => (ErrorKind::Fatal, advice),
        (None, ClientError::PermissionDenied { .. } | ClientError::Unauthenticated { .. }, _)
        | (None, _, Some(401 | 403)) => (
            ErrorKind::Fatal,
            "the remote refuses access: give these credentials the right to read, write and list it",
        ),
        (None, _, Some(408 | 409 | 412 | 429)) => {
            (ErrorKind::Retry, "the remote did not serve this request: a later retry may succeed")
        }
        // S3 reports a body that arrived too slowly as a bad request, although a retry may succeed.
        (None, _, Some(400)) if text.contains("RequestTimeout") => {
            (ErrorKind::Retry, "the remote stopped waiting for the rest of this request")
        }
        (None, _, Some(300..=499)) => (
            ErrorKind::Fatal,
            "the remote refuses this request: check that the endpoint is an object store, and that \
             the option style (path or virtual) fits it",
        ),
        _ => (ErrorKind::Retry, "the remote cannot be reached, or answers with an error"),
    };
    Error::new(kind, message).with("remote", remote).because(summary(&text))
}

/// Returns `text` without the XML, HTML or JSON document that a server sent, but with the
/// document's error code.
fn summary(text: &str) -> String {
    let (front, body) = text.split_at(text.find(['<', '{', '\n']).unwrap_or(text.len()));
    let front = front.split_once("Server returned").map_or(front, |(_, rest)| rest.trim());
    let code = body.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>"));
    let code = code.map_or("", |(code, _)| code);
    let front = without_secrets(front);
    let front = front.trim_start_matches("non-2xx").trim().trim_end_matches(':');
    let brief = if code.is_empty() { front.to_owned() } else { format!("{front}: {code}") };
    brief.chars().take(MESSAGE_CHARS_MAX).collect()
}

/// `text` without user info and queries of URLs: a query may hold a signature or a token.
pub(crate) fn without_secrets(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, url) = rest.split_at(at + 3);
        let end = url.find(|c: char| c.is_whitespace() || "()<>\"'`".contains(c));
        let (url, after) = url.split_at(end.unwrap_or(url.len()));
        let (front, query) = url.split_once('?').map_or((url, ""), |(front, _)| (front, "?…"));
        let host = front.split('/').next().unwrap_or_default();
        let user = host.rfind('@').map_or(0, |at| at + 1);
        shown.extend([before, &front[user..], query]);
        rest = after;
    }
    shown.push_str(rest);
    shown
}

fn contains_any(text: &str, words: &[&str]) -> bool {
    words.iter().any(|word| text.contains(word))
}

/// The status code, which the client's error exposes only in its text.
fn status(text: &str) -> Option<u16> {
    let (_, rest) = text.split_once("status code: ")?;
    rest.get(..3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(text: &str) -> ClientError {
        ClientError::Generic { store: "S3", source: text.into() }
    }

    fn kind(text: &str) -> ErrorKind {
        to_error(generic(text), "s3://b").kind()
    }

    #[test]
    fn only_transient_errors_are_retried() {
        for status in ["500", "502", "503 Slow Down", "504", "429", "408"] {
            let text = format!("Server returned non-2xx status code: {status}: <Error/>");
            assert_eq!(kind(&text), ErrorKind::Retry, "{status}");
        }
        for status in ["400", "401", "403", "301", "405"] {
            let text = format!("Server returned non-2xx status code: {status}: <Error/>");
            assert_eq!(kind(&text), ErrorKind::Fatal, "{status}");
        }
        for text in ["connection reset by peer", "operation timed out", "error sending request"] {
            assert_eq!(kind(text), ErrorKind::Retry, "{text}");
        }
        assert_eq!(kind("status code: 404: <Code>NoSuchBucket</Code>"), ErrorKind::Fatal);
        assert_eq!(kind("status code: 400 Bad: <Code>RequestTimeout</Code>"), ErrorKind::Retry);
    }

    #[test]
    fn missing_bucket_is_not_missing_object() {
        let missing = |text: &str| ClientError::NotFound { path: "p".into(), source: text.into() };
        assert!(is_not_found(&missing(
            "status code: 404 Not Found: <Error><Code>NoSuchKey</Code>"
        )));
        assert!(is_not_found(&missing("status code: 404 Not Found: ")));
        for body in [
            "<Code>NoSuchBucket</Code>",
            "<Code>XAdminUserNotFound</Code>",
            "<html>a web server</html>",
        ] {
            assert!(
                !is_not_found(&missing(&format!("status code: 404 Not Found: {body}"))),
                "{body}"
            );
        }
        let advice = to_error(missing("status code: 404: <Code>NoSuchBucket</Code>"), "s3://b/p");
        assert!(advice.to_string().contains("make it") && advice.to_string().contains("s3://b/p"));
    }

    #[test]
    fn archived_object_is_not_found() {
        let refused = |code: &str| ClientError::PermissionDenied {
            path: "p".into(),
            source: format!("status code: 403 Forbidden: <Error><Code>{code}</Code>").into(),
        };
        assert!(is_not_found(&refused("InvalidObjectState")));
        assert!(!is_not_found(&refused("AccessDenied")));
    }

    #[test]
    fn answer_is_summarized() {
        let text = "Error performing GET http://h/b in 1ms - Server returned non-2xx status code: 403 Forbidden: \
                    <?xml?>\n<Error><Code>AccessDenied</Code><Message>long</Message></Error>";
        assert_eq!(summary(text), "status code: 403 Forbidden: AccessDenied");
        assert_eq!(summary("connection reset by peer"), "connection reset by peer");
        assert_eq!(summary(""), "");
    }

    #[test]
    fn urls_in_messages_show_no_secret() {
        let text = "error sending request for url (https://me:hunter2@h/b?sig=hunter2&x=1): \
                    http://h:1/p?hunter2";
        let shown = "error sending request for url (https://h/b?…): http://h:1/p?…";
        assert_eq!(summary(text), shown);
        assert_eq!(without_secrets("no URL: a@b?c"), "no URL: a@b?c");
    }

    #[test]
    fn long_answer_is_cut() {
        let advice = to_error(generic(&"ä".repeat(10_000)), "s3://b").to_string();
        assert!(advice.chars().count() < MESSAGE_CHARS_MAX + 200);
    }
}

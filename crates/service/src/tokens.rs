//! Tokens, and the roles that they give.

use crate::guarded_file::GuardedFile;
use crate::limits::{REQUESTS_BURST, REQUESTS_PER_SECOND};
use crate::rate::RateLimit;
use crate::reread::FromFiles;
use crate::role::Role;
use ritornello_format::{Error, Result};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

/// Maximum bytes of a token file.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// Maximum number of tokens.
const TOKENS_MAX: usize = 64;
/// Minimum characters of a token: 128 random bits take 24 in base64, 32 in hexadecimal digits.
const TOKEN_CHARS_MIN: usize = 24;
/// Maximum characters of a token.
const TOKEN_CHARS_MAX: usize = 256;
/// Context string of BLAKE3's key derivation, by which tokens are hashed: digests with another
/// context are different.
const CONTEXT: &str = "ritornello 2026 service token v1";

/// The tokens of a service, of which only digests are kept.
pub struct Tokens {
    file: PathBuf,
    known: Vec<Token>,
}

/// A token, and the limit of the rate of requests with it.
struct Token {
    role: Role,
    digest: [u8; 32],
    rate: Arc<RateLimit>,
}

impl Tokens {
    /// Reads a token file: one token per line, after its role. Empty lines and lines that begin
    /// with `#` do not count.
    ///
    /// # Errors
    /// `Invalid` if the file cannot be read or is not a regular file, group or others have any
    /// permission on it, it belongs to another user, it is too long, it has no token or too many,
    /// or a line is malformed. No error contains a token.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = GuardedFile {
            name: "token file",
            path,
            bytes_max: FILE_BYTES_MAX,
            forbidden: (0o077, "chmod 600 the file"),
            owned_by_root: Some(false),
        }
        .read()?;
        let text = String::from_utf8(bytes).map_err(|_| {
            Error::invalid("the token file is not text in UTF-8: write it again")
                .with("file", path.display())
        })?;
        let known = parse(&text).map_err(|error| error.with("file", path.display()))?;
        Ok(Self { file: path.to_owned(), known })
    }

    /// Returns the role that `token` gives, and the limit of the rate of requests with it. The
    /// comparisons take the same time for each token of the same length.
    pub(crate) fn find(&self, token: &str) -> Option<(Role, &RateLimit)> {
        let given = digest(token);
        let (mut found, mut at) = (Choice::from(0), 0_u8);
        for (number, known) in (0_u8..).zip(&self.known) {
            let is_equal = known.digest[..].ct_eq(&given[..]);
            at.conditional_assign(&number, is_equal);
            found |= is_equal;
        }
        let known = &self.known[usize::from(at)];
        bool::from(found).then_some((known.role, &known.rate))
    }
}

fn parse(text: &str) -> Result<Vec<Token>> {
    let mut tokens: Vec<Token> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let refused = |message: &str| Error::invalid(message).with("line", number);
        let mut words = line.split_ascii_whitespace();
        let (Some(role), Some(token), None) = (words.next(), words.next(), words.next()) else {
            return Err(refused("a line of the token file is a role and a token"));
        };
        let role = Role::parse(role)
            .ok_or_else(|| refused("the role of a token is read, operate or admin"))?;
        let is_legal = token.bytes().all(|byte| byte.is_ascii_graphic());
        if !(TOKEN_CHARS_MIN..=TOKEN_CHARS_MAX).contains(&token.len()) || !is_legal {
            return Err(refused(
                "a token has 24 to 256 visible ASCII characters: make one with `openssl rand \
                 -hex 32`",
            ));
        }
        let digest = digest(token);
        if tokens.iter().any(|known| known.digest == digest) {
            return Err(refused("the token file has a token twice: remove one of the lines"));
        }
        let rate = Arc::new(RateLimit::new(REQUESTS_PER_SECOND, REQUESTS_BURST));
        tokens.push(Token { role, digest, rate });
    }
    if tokens.is_empty() {
        return Err(Error::invalid("the token file has no tokens: add a line `read TOKEN`"));
    }
    if tokens.len() > TOKENS_MAX {
        return Err(Error::invalid("the token file has too many tokens: remove some")
            .with("max", TOKENS_MAX));
    }
    Ok(tokens)
}

fn digest(token: &str) -> [u8; 32] {
    blake3::derive_key(CONTEXT, token.as_bytes())
}

impl FromFiles for Tokens {
    const NAME: &'static str = "tokens";

    fn files(&self) -> Vec<PathBuf> {
        vec![self.file.clone()]
    }

    fn read_again(&self) -> Result<Self> {
        let mut tokens = Self::read(&self.file)?;
        // A token that stays keeps its limit: a program that writes the file again and again would
        // otherwise lift the limit.
        for token in &mut tokens.known {
            if let Some(old) = self.known.iter().find(|old| old.digest == token.digest) {
                token.rate = Arc::clone(&old.rate);
            }
        }
        Ok(tokens)
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").field("count", &self.known.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::PermissionsExt;

    const READ: &str = "read-0123456789abcdef0123";
    const ADMIN: &str = "admin-0123456789abcdef0123";

    fn refusal(text: &str) -> String {
        parse(text).map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn only_tokens_of_the_file_give_roles() {
        let text = format!("# a comment\n\n read {READ} \nadmin\t{ADMIN}\n");
        let tokens = Tokens { file: PathBuf::new(), known: parse(&text).unwrap() };
        let role = |token| tokens.find(token).map(|(role, _)| role);
        assert_eq!((role(READ), role(ADMIN)), (Some(Role::Read), Some(Role::Admin)));
        for wrong in ["", "read", &READ[..24], &format!("{READ}0"), &READ.to_uppercase(), "#"] {
            assert_eq!(role(wrong), None, "{wrong}");
        }
        assert!(!format!("{tokens:?}").contains("0123"));
    }

    #[test]
    fn malformed_lines_are_refused_without_showing_tokens() {
        for text in [
            format!("write {READ}"),
            READ.to_owned(),
            format!("read {READ} {ADMIN}"),
            format!("read {}", &READ[..20]),
            format!("read {}", "x".repeat(257)),
            format!("read {READ}\u{e9}"),
            format!("read {READ}\nadmin {READ}"),
        ] {
            let error = refusal(&text);
            assert!(error.contains("line=") && !error.contains("0123"), "{error}");
        }
        assert!(refusal("# none\n").contains("no tokens"));
        let many: Vec<_> = (0..65).map(|number| format!("read {READ}{number}")).collect();
        assert!(refusal(&many.join("\n")).contains("too many"));
    }

    #[test]
    fn file_open_to_other_users_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        write(&path, format!("read {READ}\n")).unwrap();
        for mode in [0o644, 0o640, 0o604, 0o620, 0o601] {
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let error = Tokens::read(&path).unwrap_err().to_string();
            assert!(error.contains("chmod 600") && error.contains("mode="), "{error}");
        }
        for mode in [0o600, 0o400] {
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert!(Tokens::read(&path).unwrap().find(READ).is_some());
        }
        set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        write(&path, "x".repeat(70_000)).unwrap();
        assert!(Tokens::read(&path).unwrap_err().to_string().contains("too long"));
        assert!(Tokens::read(dir.path()).unwrap_err().to_string().contains("regular file"));
        let pipe = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg("-m600").arg(&pipe).status();
        assert!(made.unwrap().success());
        assert!(Tokens::read(&pipe).unwrap_err().to_string().contains("regular file"));
        let missing = Tokens::read(&dir.path().join("none")).unwrap_err().to_string();
        assert!(missing.contains("cannot be opened") && missing.contains("none"), "{missing}");
    }
}

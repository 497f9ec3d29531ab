//! Tokens, and the roles that they give.

use crate::role::Role;
use ritornello_format::{Error, Result};
use rustix::fs::OFlags;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

/// Maximum bytes of a token file.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// Maximum number of tokens.
const TOKENS_MAX: usize = 64;
/// Minimum characters of a token: 128 random bits in hexadecimal digits have 32.
const TOKEN_CHARS_MIN: usize = 24;
/// Maximum characters of a token.
const TOKEN_CHARS_MAX: usize = 256;
/// Context string of BLAKE3's key derivation, by which tokens are hashed: digests with another
/// context are different.
const CONTEXT: &str = "ritornello 2026 service token v1";

/// The tokens of a service. Holds digests only.
pub struct Tokens(Vec<(Role, [u8; 32])>);

impl Tokens {
    /// Reads a token file: one token per line, after its role. Empty lines and lines that begin
    /// with `#` do not count.
    ///
    /// # Errors
    /// `Invalid` if the file cannot be read or is not a regular file, group or others have any
    /// permission on it, it belongs to another user, it is too long, it has no token or too many,
    /// or a line is malformed. No error contains a token.
    pub fn read(path: &Path) -> Result<Self> {
        let failed = |message: &str| Error::invalid(message).with("file", path.display());
        // Without this flag the open of a pipe would wait for a writer.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let file = File::options().read(true).custom_flags(flags).open(path).map_err(|error| {
            failed("the token file cannot be read: name a file of the user of this process")
                .because(error)
        })?;
        let found = file.metadata()?;
        if !found.is_file() {
            return Err(failed("the token file is not a regular file: name a file with tokens"));
        }
        if found.mode() & 0o077 != 0 {
            let mode = format!("{:o}", found.mode() & 0o777);
            return Err(failed("other users have access to the token file: chmod 600 the file")
                .with("mode", mode));
        }
        if found.uid() != rustix::process::geteuid().as_raw() {
            return Err(failed("the token file belongs to another user: chown the file")
                .with("owner", found.uid()));
        }
        let mut text = String::new();
        file.take(FILE_BYTES_MAX + 1)
            .read_to_string(&mut text)
            .map_err(|error| failed("the token file is not text in UTF-8").because(error))?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(failed("the token file is too long: remove lines")
                .with("max_bytes", FILE_BYTES_MAX));
        }
        Self::parse(&text).map_err(|error| error.with("file", path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let mut tokens = Vec::new();
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
            if tokens.iter().any(|(_, known)| *known == digest) {
                return Err(refused("the token file has a token twice: remove one of the lines"));
            }
            tokens.push((role, digest));
        }
        if tokens.is_empty() {
            return Err(Error::invalid("the token file has no tokens: add a line `read TOKEN`"));
        }
        if tokens.len() > TOKENS_MAX {
            return Err(Error::invalid("the token file has too many tokens: remove some")
                .with("max", TOKENS_MAX));
        }
        Ok(Self(tokens))
    }

    /// The number of tokens.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Returns the position of `token` in the file, and the role that it gives. The comparisons
    /// take the same time for each token of the same length.
    pub(crate) fn find(&self, token: &str) -> Option<(usize, Role)> {
        let given = digest(token);
        let (mut found, mut at) = (Choice::from(0), 0_u8);
        for (number, (_, known)) in (0_u8..).zip(&self.0) {
            let is_equal = known[..].ct_eq(&given[..]);
            at.conditional_assign(&number, is_equal);
            found |= is_equal;
        }
        let at = usize::from(at);
        bool::from(found).then(|| (at, self.0[at].0))
    }
}

fn digest(token: &str) -> [u8; 32] {
    blake3::derive_key(CONTEXT, token.as_bytes())
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").field("count", &self.0.len()).finish_non_exhaustive()
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
        Tokens::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn only_tokens_of_the_file_give_roles() {
        let text = format!("# a comment\n\n read {READ} \nadmin\t{ADMIN}\n");
        let tokens = Tokens::parse(&text).unwrap();
        assert_eq!(tokens.find(READ), Some((0, Role::Read)));
        assert_eq!(tokens.find(ADMIN), Some((1, Role::Admin)));
        for wrong in ["", "read", &READ[..24], &format!("{READ}0"), &READ.to_uppercase(), "#"] {
            assert_eq!(tokens.find(wrong), None, "{wrong}");
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
            assert_eq!(Tokens::read(&path).unwrap().find(READ), Some((0, Role::Read)));
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
        assert!(missing.contains("cannot be read") && missing.contains("none"), "{missing}");
    }
}

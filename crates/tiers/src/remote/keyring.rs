//! The keys that authenticate a remote's objects, and their file.

use ritornello_format::{Error, Result};
use rustix::fs::{Mode, OFlags};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Bytes of a key id in a seal; shorter ids are padded with zeros.
pub(super) const ID_BYTES: usize = 16;
/// Maximum number of keys in a file, and maximum length of the file in bytes.
const KEYS_MAX: usize = 32;
const FILE_BYTES_MAX: u64 = 64 << 10;
/// Permission bits that must not be set. The group may read the file, as with secrets that an
/// orchestrator mounts.
const OTHERS: u32 = 0o027;

/// A key and its id.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) id: [u8; ID_BYTES],
    pub(super) secret: [u8; 32],
}

/// The keys of a file: the first key seals written objects, all keys verify objects that are read.
///
/// The file has one key per line, `ID HEX`: an id of 1 to 16 characters `A-Z a-z 0-9 . _ -`, and 64
/// hexadecimal digits. Empty lines and lines that begin with `#` are skipped.
#[derive(Clone, PartialEq, Eq)]
pub struct KeyRing {
    /// Unset until the file of a deferred key ring has been read.
    keys: OnceLock<Vec<Key>>,
    /// The file of a deferred key ring.
    deferred: Option<PathBuf>,
}

impl KeyRing {
    /// The keys of the file at `path`, which [`load`](Self::load) reads. Until then the key ring
    /// has no keys: nothing can be sealed, and no seal can be verified.
    #[must_use]
    pub fn deferred(path: &Path) -> Self {
        Self { keys: OnceLock::new(), deferred: Some(path.to_owned()) }
    }

    /// Reads the file of a deferred key ring, unless an earlier call has read it.
    ///
    /// # Errors
    /// Fails as [`read`](Self::read) does. A later call reads the file again.
    pub fn load(&self) -> Result<()> {
        if let Some(path) = &self.deferred
            && self.keys.get().is_none()
        {
            let read = Self::read(path)?;
            if let Some(keys) = read.keys.into_inner() {
                // If two calls read the file at the same time, the keys of the first call stay.
                let _ = self.keys.set(keys);
            }
        }
        Ok(())
    }

    /// Reads the file at `path`.
    ///
    /// # Errors
    /// `Invalid` if the file cannot be read or parsed, if others have any access to it, or if its
    /// group may write it. Messages quote only ids from the file.
    pub fn read(path: &Path) -> Result<Self> {
        let refused = |why: &str| Error::invalid(why).with("file", path.display());
        // `NONBLOCK` keeps the opening of a pipe from waiting for a writer.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| {
            refused("the remote's key file cannot be opened: make it, or correct ?key=")
                .because(error)
        })?;
        let file = File::from(file);
        let metadata = file
            .metadata()
            .map_err(|error| refused("the remote's key file cannot be read").because(error))?;
        if !metadata.is_file() {
            return Err(refused("the remote's key file is not a regular file: correct ?key="));
        }
        if metadata.mode() & OTHERS != 0 {
            return Err(refused(
                "the remote's key file is open to others, or its group can write it: chmod 600 it, \
                 and make new keys if others had access",
            )
            .with("mode", format_args!("{:o}", metadata.mode() & 0o777)));
        }
        let mut text = String::new();
        file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(|error| {
            refused("the remote's key file cannot be read: it is text, one `ID HEX` per line")
                .because(error)
        })?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(refused("the remote's key file is longer than 64 KiB: correct ?key="));
        }
        Self::parse(&text).map_err(|error| error.with("file", path.display()))
    }

    /// Parses the text of a key file.
    ///
    /// # Errors
    /// `Invalid`, with the number of the line, or without a number if the text has no key at all.
    /// The line is not quoted: it may hold a key.
    pub fn parse(text: &str) -> Result<Self> {
        let mut keys: Vec<Key> = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let refused = |why: String| Error::invalid(why).with("line", at + 1);
            let key = Key::parse(line).ok_or_else(|| {
                refused(
                    "a key is a line `ID HEX`: 1 to 16 of A-Z a-z 0-9 . _ -, then 64 hexadecimal digits, \
                     as in `echo \"2026a $(openssl rand -hex 32)\"`"
                        .to_owned(),
                )
            })?;
            if keys.iter().any(|known| known.id == key.id) {
                return Err(refused("duplicate key id: give each key a different id".to_owned())
                    .with("id", id_text(&key.id)));
            }
            if keys.len() == KEYS_MAX {
                return Err(refused(format!(
                    "a key file has at most {KEYS_MAX} keys: remove old keys"
                )));
            }
            keys.push(key);
        }
        if keys.is_empty() {
            return Err(Error::invalid("the remote's key file holds no key: add a line `ID HEX`"));
        }
        Ok(Self { keys: OnceLock::from(keys), deferred: None })
    }

    /// The keys in the order of the file; none before a deferred file is read.
    fn keys(&self) -> &[Key] {
        self.keys.get().map(Vec::as_slice).unwrap_or_default()
    }

    /// Ids of the keys; the first key seals written objects.
    #[must_use]
    pub fn ids(&self) -> Vec<String> {
        self.keys().iter().map(|key| id_text(&key.id)).collect()
    }

    /// The key that seals written objects; `None` before a deferred file is read.
    pub(super) fn newest(&self) -> Option<&Key> {
        self.keys().first()
    }

    pub(super) fn find(&self, id: &[u8; ID_BYTES]) -> Option<&Key> {
        self.keys().iter().find(|key| key.id == *id)
    }
}

impl Key {
    fn parse(line: &str) -> Option<Self> {
        let (id, hex) = line.split_once(char::is_whitespace)?;
        let hex = hex.trim_start().as_bytes();
        let fits = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'_' | b'-');
        if !(1..=ID_BYTES).contains(&id.len()) || !id.bytes().all(fits) || hex.len() != 64 {
            return None;
        }
        let mut key = Self { id: [0; ID_BYTES], secret: [0; 32] };
        key.id[..id.len()].copy_from_slice(id.as_bytes());
        for (byte, two) in key.secret.iter_mut().zip(hex.chunks(2)) {
            let digit = |c: u8| char::from(c).to_digit(16);
            *byte = (digit(two[0])? << 4 | digit(two[1])?) as u8;
        }
        Some(key)
    }
}

/// An id as text; bytes that no key file can hold are escaped.
pub(super) fn id_text(id: &[u8; ID_BYTES]) -> String {
    let end = id.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    id[..end].escape_ascii().to_string()
}

/// Shows ids only.
impl fmt::Debug for KeyRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("KeyRing").field(&self.ids()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    const HEX: &str = "00112233445566778899aabbccddeeff00112233445566778899AABBCCDDEEFF";

    fn parse(text: &str) -> Result<KeyRing> {
        KeyRing::parse(text)
    }

    #[test]
    fn keys_keep_their_order_and_are_found_by_id() {
        let ring = parse(&format!("# keys\n\n new {HEX}\nold\t {}\n", "0".repeat(64))).unwrap();
        assert_eq!(ring.ids(), ["new", "old"]);
        let newest = ring.newest().unwrap();
        assert_eq!((newest.secret[0], newest.secret[31]), (0, 0xff));
        let mut old = [0; ID_BYTES];
        old[..3].copy_from_slice(b"old");
        assert_eq!(ring.find(&old).unwrap().secret, [0; 32]);
        assert!(ring.find(&[0; ID_BYTES]).is_none());
    }

    #[test]
    fn errors_of_key_files_quote_no_key() {
        let many: String = (0..=KEYS_MAX).map(|at| format!("k{at} {HEX}\n")).collect();
        for text in [
            "",
            "# none",
            HEX,
            "a",
            &format!("a {}", &HEX[1..]),
            &format!("a {HEX}0"),
            &format!("a g{}", &HEX[1..]),
            &format!("seventeen-letters {HEX}"),
            &format!("a/b {HEX}"),
            &format!("a {HEX}\na {HEX}"),
            &many,
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(!error.contains("2233445566"), "{error}");
        }
        assert!(parse(&format!("a {HEX}\nb")).unwrap_err().to_string().contains("line=2"));
        assert!(!format!("{:?}", parse(&format!("a {HEX}")).unwrap()).contains("2233"));
    }

    #[test]
    fn key_file_that_others_can_read_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, format!("a {HEX}\n")).unwrap();
        for (mode, is_read) in [
            (0o600, true),
            (0o400, true),
            (0o440, true),
            (0o604, false),
            (0o644, false),
            (0o660, false),
        ] {
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let read = KeyRing::read(&path);
            assert_eq!(read.is_ok(), is_read, "{mode:o}");
            if let Err(error) = read {
                assert!(error.to_string().contains("chmod 600"), "{error}");
            }
        }
        assert!(KeyRing::read(dir.path()).unwrap_err().to_string().contains("regular file"));
        let none = KeyRing::read(&dir.path().join("none")).unwrap_err().to_string();
        assert!(none.contains("?key="), "{none}");
        std::fs::write(&path, vec![b'#'; 65 << 10]).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert!(KeyRing::read(&path).unwrap_err().to_string().contains("64 KiB"));
    }

    #[test]
    fn deferred_file_is_read_once_it_is_usable() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let ring = KeyRing::deferred(&path);
        for text in [None, Some("a")] {
            if let Some(text) = text {
                std::fs::write(&path, text).unwrap();
            }
            let error = ring.load().unwrap_err().to_string();
            assert!(error.contains(&path.display().to_string()), "{error}");
            assert!(ring.newest().is_none() && ring.ids().is_empty());
        }
        std::fs::write(&path, format!("a {HEX}\n")).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        ring.load().unwrap();
        assert_eq!(ring.ids(), ["a"]);
        // The key ring keeps its keys after the file was removed.
        std::fs::remove_file(&path).unwrap();
        ring.load().unwrap();
        assert_eq!(ring.ids(), ["a"]);
    }
}

//! The certificate of a service that encrypts its connections.

use crate::guarded_file::GuardedFile;
use crate::reread::FromFiles;
use ritornello_format::{Error, Result};
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Maximum bytes of the file of the certificate: most certificates have one to two KiB.
const CHAIN_BYTES_MAX: u64 = 1 << 20;
/// Maximum bytes of the file of the key: an RSA key of 16,384 bits has less than 13 KiB.
const KEY_BYTES_MAX: u64 = 64 << 10;

/// A certificate chain with its private key, and the settings of TLS connections that use them: TLS
/// 1.2 and 1.3, HTTP/1.1, without certificates of clients.
pub struct Certificate {
    chain_file: PathBuf,
    key_file: PathBuf,
    config: Arc<ServerConfig>,
}

impl Certificate {
    /// Reads two files in the format PEM: the chain, which begins with the service's certificate,
    /// and its private key.
    ///
    /// # Errors
    /// `Invalid` if a file cannot be read, is too long, or has no certificate or key; if the file
    /// of the key belongs neither to root nor to the user of this process, its group may write to
    /// it, or users outside its group have access to it; or if the key does not match the
    /// certificate. No error contains the key.
    pub fn read(chain_file: &Path, key_file: &Path) -> Result<Self> {
        let read = |name, path, bytes_max, forbidden, owned_by_root| {
            GuardedFile { name, path, bytes_max, forbidden, owned_by_root }.read()
        };
        let chain_pem =
            read("file of the certificate", chain_file, CHAIN_BYTES_MAX, (0, ""), None)?;
        let chain: Vec<_> = CertificateDer::pem_slice_iter(&chain_pem)
            .collect::<std::result::Result<_, _>>()
            .map_err(|error| malformed("certificate", chain_file, &error))?;
        if chain.is_empty() {
            return Err(malformed("certificate", chain_file, &pem::Error::NoItemsFound));
        }
        let forbidden =
            (0o027, "chmod g-w,o= the file, or defaultMode: 0440 of a Kubernetes secret");
        let key_pem = read("file of the key", key_file, KEY_BYTES_MAX, forbidden, Some(true))?;
        let key = PrivateKeyDer::from_pem_slice(&key_pem)
            .map_err(|error| malformed("private key", key_file, &error))?;
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
            .map_err(|error| {
                Error::invalid(
                    "certificate and key cannot be used: name a file that begins with the \
                     service's certificate, and the key of this certificate",
                )
                .with("certificate", chain_file.display())
                .with("key", key_file.display())
                .because(error)
            })?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let (chain_file, key_file) = (chain_file.to_owned(), key_file.to_owned());
        Ok(Self { chain_file, key_file, config: Arc::new(config) })
    }

    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config)
    }
}

/// Returns the error of a file in which no usable `what` was found, because of `error`. Leaves out
/// the text of `error`, which may contain a part of the file, such as a whole key on one line.
fn malformed(what: &str, file: &Path, error: &pem::Error) -> Error {
    let found = match error {
        pem::Error::MissingSectionEnd { .. } => "a BEGIN line has no END line of its own",
        pem::Error::IllegalSectionStart { .. } => "a BEGIN line does not end in exactly 5 hyphens",
        pem::Error::Base64Decode(_) => "text between BEGIN and END is not base64",
        pem::Error::NoItemsFound => "none was found",
        _ => "the file cannot be read",
    };
    let remedy = "name a PEM file; decrypt a key with `openssl pkey -in FILE -out NEW`";
    Error::invalid(format!("the file has no usable {what}, {found}: {remedy}"))
        .with("file", file.display())
}

impl FromFiles for Certificate {
    const NAME: &'static str = "certificate and its key";

    fn files(&self) -> Vec<PathBuf> {
        vec![self.chain_file.clone(), self.key_file.clone()]
    }

    fn read_again(&self) -> Result<Self> {
        Self::read(&self.chain_file, &self.key_file)
    }
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate").field("file", &self.chain_file).finish_non_exhaustive()
    }
}

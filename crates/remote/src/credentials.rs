//! S3 credentials from files, which are reread when they change, because keys are rotated while
//! engines run.

use crate::profile::{ProfileFiles, Stamp};
use async_trait::async_trait;
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use parking_lot::Mutex;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct ProfileCredentials {
    files: ProfileFiles,
    last: Mutex<(Stamp, Arc<AwsCredential>)>,
}

impl ProfileCredentials {
    /// Reads the profile's access key; `None` if the files cannot be read, or hold no key for the
    /// profile.
    pub(crate) fn open(files: ProfileFiles) -> Option<Self> {
        let read = read(&files)?;
        Some(Self { files, last: Mutex::new(read) })
    }
}

/// Reads the profile's access key from the files. Returns it with the version of the files that it
/// was read from.
fn read(files: &ProfileFiles) -> Option<(Stamp, Arc<AwsCredential>)> {
    // Take the stamp before the files are read, so that the next request detects a change during
    // the read.
    let stamp = files.stamp();
    let profile = files.read().ok()?;
    let (key_id, secret_key) = (profile.id?, profile.secret?);
    Some((stamp, Arc::new(AwsCredential { key_id, secret_key, token: profile.token })))
}

#[async_trait]
impl CredentialProvider for ProfileCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let mut last = self.last.lock();
        // If the changed files have no key, for example during a replacement, keep using the last
        // key.
        if self.files.stamp() != last.0
            && let Some(read) = read(&self.files)
        {
            if read.1 != last.1 {
                tracing::info!("the credentials of a remote have changed and were reread");
            }
            *last = read;
        }
        Ok(Arc::clone(&last.1))
    }
}

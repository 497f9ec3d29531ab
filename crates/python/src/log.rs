//! The log of the core in a Python process: standard error, filtered by the environment variable
//! `RITORNELLO_LOG` (`warn` unless set; `info`, `ritornello_store=debug`...).

use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// Starts logging unless the process has a subscriber.
pub(crate) fn start() {
    let filter = EnvFilter::try_from_env("RITORNELLO_LOG").unwrap_or_else(|_| "warn".into());
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    // The call fails if the process has a subscriber, such as the command line's, which then stays.
    let _ = lines.try_init();
}

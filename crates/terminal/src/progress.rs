//! Progress on standard error, shown on terminals only.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::time::Duration;

/// Returns a bar over bytes with the message `what`. Its length is zero until the caller sets it.
#[must_use]
pub fn bar(what: &str) -> ProgressBar {
    styled("{msg} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}", what, 0)
}

/// Returns a bar over a number of steps. The caller sets its message to the current step.
#[must_use]
pub fn steps(count: u64) -> ProgressBar {
    let bar = styled("{spinner} {pos}/{len} {wide_msg} {elapsed}", "", count);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn styled(template: &str, what: &str, length: u64) -> ProgressBar {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr_with_hz(5)
    } else {
        ProgressDrawTarget::hidden()
    };
    let bar = ProgressBar::with_draw_target(Some(length), target);
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_message(what.to_owned());
    bar
}

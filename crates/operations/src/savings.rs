//! The savings of loads: tokens that engines did not compute, the estimated time, and its price.

use ritornello_terminal::print::count;
use serde::Serialize;
use std::collections::BTreeMap;

/// Savings since the owner opened the store. The time of prefill is estimated, the time of loads
/// measured; neither covers untimed tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Savings {
    /// Tokens that were loaded and not computed.
    avoided_tokens: u64,
    /// Tokens of `avoided_tokens` that were loaded before a prefill of their engine was measured.
    untimed_tokens: u64,
    /// Estimated seconds to compute the tokens of `avoided_tokens` that are not untimed.
    prefill_seconds: f64,
    /// Seconds of the loads of the tokens that are not untimed, and of loads that failed.
    load_seconds: f64,
    /// `prefill_seconds` less `load_seconds`; negative for a loss.
    net_seconds: f64,
    /// The price of an hour of an engine's GPUs, if it was given.
    gpu_hour: Option<f64>,
    /// The price of `net_seconds`.
    estimated_money: Option<f64>,
}

impl Savings {
    /// Returns the savings that an owner counted; `None` if the owner's build does not count them.
    /// `gpu_hour`: the price of an hour of an engine's GPUs.
    #[must_use]
    pub fn of(counters: &BTreeMap<String, u64>, gpu_hour: Option<f64>) -> Option<Self> {
        let counter = |name: &str| counters.get(name).copied();
        let seconds = |name: &str| Some(counter(name)? as f64 / 1e6);
        let prefill_seconds = seconds("prefill_avoided_micros")?;
        let load_seconds = seconds("prefill_load_micros")?;
        let net_seconds = prefill_seconds - load_seconds;
        Some(Self {
            avoided_tokens: counter("prefill_avoided_tokens")?,
            untimed_tokens: counter("prefill_untimed_tokens")?,
            prefill_seconds,
            load_seconds,
            net_seconds,
            gpu_hour,
            estimated_money: gpu_hour.map(|price| net_seconds / 3600.0 * price),
        })
    }

    /// Formats the savings on one line.
    #[must_use]
    pub fn line(&self) -> String {
        let Self { avoided_tokens: tokens, untimed_tokens: untimed, .. } = *self;
        let mut text = format!("{} tokens loaded instead of computed", count(tokens));
        if untimed > 0 {
            text += &format!(", {} of them untimed", count(untimed));
        }
        if self.prefill_seconds > 0.0 || self.load_seconds > 0.0 {
            text += &format!(
                "; estimate: {} of prefill less {} of loads is {}",
                duration(self.prefill_seconds),
                duration(self.load_seconds),
                duration(self.net_seconds)
            );
        }
        if let (Some(price), Some(money)) = (self.gpu_hour, self.estimated_money) {
            text += &format!("; at {price} per hour about {} (estimate)", amount(money));
        }
        text
    }
}

/// Formats a duration in hours if its absolute value is at least an hour, in minutes if it is at
/// least a minute, and in seconds if it is shorter.
fn duration(seconds: f64) -> String {
    match seconds.abs() {
        hours if hours >= 3600.0 => format!("{:.1} h", seconds / 3600.0),
        minutes if minutes >= 60.0 => format!("{:.1} min", seconds / 60.0),
        _ => format!("{seconds:.1} s"),
    }
}

/// Formats an amount of money: two decimal places, four below 1.
fn amount(money: f64) -> String {
    if money.abs() < 1.0 { format!("{money:.4}") } else { format!("{money:.2}") }
}

/// Parses the price of an hour.
///
/// # Errors
/// If `text` is not a finite number of at least zero.
pub fn parse_price(text: &str) -> Result<f64, String> {
    let price = text.parse().ok().filter(|price: &f64| price.is_finite() && *price >= 0.0);
    price.ok_or_else(|| "pass a number without a currency, such as 2.5".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn savings(counts: [u64; 4], gpu_hour: Option<f64>) -> Savings {
        let names = [
            "prefill_avoided_tokens",
            "prefill_untimed_tokens",
            "prefill_avoided_micros",
            "prefill_load_micros",
        ];
        let counters = names.into_iter().map(str::to_owned).zip(counts).collect();
        Savings::of(&counters, gpu_hour).unwrap()
    }

    #[test]
    fn price_is_of_the_net_time() {
        let made = savings([2_000_000, 0, 8_000_000_000, 800_000_000], Some(2.5));
        assert_eq!((made.net_seconds, made.estimated_money), (7_200.0, Some(5.0)));
        assert_eq!(
            made.line(),
            "2,000,000 tokens loaded instead of computed; estimate: 2.2 h of prefill less 13.3 min \
             of loads is 2.0 h; at 2.5 per hour about 5.00 (estimate)"
        );
    }

    #[test]
    fn loss_is_negative() {
        let made = savings([500, 20, 1_000_000, 73_000_000], Some(3.0));
        assert_eq!(made.estimated_money, Some(-0.06));
        assert_eq!(
            made.line(),
            "500 tokens loaded instead of computed, 20 of them untimed; estimate: 1.0 s of prefill \
             less 1.2 min of loads is -1.2 min; at 3 per hour about -0.0600 (estimate)"
        );
    }

    #[test]
    fn untimed_tokens_are_shown_without_times() {
        let made = savings([500, 500, 0, 0], None);
        assert_eq!(made.line(), "500 tokens loaded instead of computed, 500 of them untimed");
        assert_eq!(made.estimated_money, None);
        assert_eq!(Savings::of(&BTreeMap::new(), Some(1.0)), None, "an owner of an earlier build");
    }

    #[test]
    fn prices_are_finite_and_not_negative() {
        assert_eq!(parse_price("2.5"), Ok(2.5));
        for wrong in ["", "-1", "inf", "nan", "2 EUR"] {
            assert!(parse_price(wrong).is_err(), "{wrong}");
        }
    }
}

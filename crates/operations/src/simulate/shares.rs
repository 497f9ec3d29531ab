//! Parsers of shares, written `5%` or `0.05`.

/// Parses a share above 0 %, up to 100 %.
pub fn capacity(text: &str) -> Result<f64, String> {
    let given = number(text)?;
    if given > 0.0 && given <= 1.0 {
        return Ok(given);
    }
    Err("a capacity is above 0 % and at most 100 % of the footprint: 5% or 0.05".to_owned())
}

/// Parses a share from 0 % to below 100 %.
pub fn share(text: &str) -> Result<f64, String> {
    let given = number(text)?;
    let valid = (0.0..1.0).contains(&given);
    if valid { Ok(given) } else { Err("expected a share from 0% to below 100%".to_owned()) }
}

/// Parses `5%` or `0.05`.
fn number(text: &str) -> Result<f64, String> {
    let (digits, scale) = match text.trim().strip_suffix('%') {
        Some(digits) => (digits.trim_end(), 100.0),
        None => (text.trim(), 1.0),
    };
    let given: f64 = digits.parse().map_err(|_| "a share is written 5% or 0.05".to_owned())?;
    Ok(given / scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_parse_from_text() {
        assert_eq!(
            [capacity("5%"), capacity(" 0.05"), capacity("5 %")],
            [Ok(0.05), Ok(0.05), Ok(0.05)]
        );
        assert_eq!([capacity("100%"), share("0%")], [Ok(1.0), Ok(0.0)]);
        for bad in ["0", "0%", "101%", "30", "-5%", "NaN", "", "%", "5%%"] {
            assert!(capacity(bad).is_err(), "{bad}");
        }
        assert!(share("100%").is_err() && share("-1%").is_err());
    }
}

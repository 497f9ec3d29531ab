//! Tolerates unreadable objects in a command until consecutive failures show that the remote itself
//! fails.

use ritornello_format::{Error, ErrorKind, Result};

/// Number of consecutive failures at which the command ends.
const IN_A_ROW: u32 = 8;

#[derive(Debug, Default)]
pub(super) struct ReadFailures {
    in_a_row: u32,
    total: u64,
}

impl ReadFailures {
    /// Returns the value of `answer` or, as a value too, an error that the command tolerates.
    ///
    /// # Errors
    /// The error of `answer`, from the eighth consecutive error on. An error of kind `Invalid` is
    /// returned immediately, because the backend then lacks the operation.
    pub(super) fn tolerate<T>(
        &mut self,
        answer: Result<T>,
    ) -> Result<std::result::Result<T, Error>> {
        match answer {
            Ok(value) => {
                self.in_a_row = 0;
                Ok(Ok(value))
            }
            Err(error) => {
                self.in_a_row += 1;
                self.total += 1;
                if self.in_a_row >= IN_A_ROW || error.kind() == ErrorKind::Invalid {
                    return Err(error);
                }
                Ok(Err(error))
            }
        }
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_failures_end_a_command() {
        let mut failures = ReadFailures::default();
        let fail = || Err::<(), _>(Error::retry("unreadable"));
        for _ in 0..3 {
            for _ in 1..IN_A_ROW {
                assert!(failures.tolerate(fail()).unwrap().is_err());
            }
            assert!(failures.tolerate(Ok(())).unwrap().is_ok());
        }
        assert_eq!(failures.total(), 21);
        for _ in 1..IN_A_ROW {
            assert!(failures.tolerate(fail()).is_ok());
        }
        assert!(failures.tolerate(fail()).is_err());
        assert!(failures.tolerate(Err::<(), _>(Error::invalid("unsupported"))).is_err());
    }
}

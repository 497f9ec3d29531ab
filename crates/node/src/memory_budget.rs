//! A bound on the memory for long messages, which many connections may receive at the same time.

use ritornello_format::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A budget of memory for long messages. Holds the number of bytes that are not granted.
#[derive(Debug)]
pub(crate) struct MemoryBudget(AtomicUsize);

impl MemoryBudget {
    /// Creates a budget of `bytes`.
    pub(crate) fn new(bytes: usize) -> Arc<Self> {
        Arc::new(Self(AtomicUsize::new(bytes)))
    }

    fn try_reserve(&self, bytes: usize) -> bool {
        let less = |left: usize| left.checked_sub(bytes);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }

    fn release(&self, bytes: usize) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Bytes granted to one connection, charged to each of its budgets.
#[derive(Debug, Default)]
pub(crate) struct Grant {
    budgets: Vec<Arc<MemoryBudget>>,
    bytes: usize,
}

impl Grant {
    /// Creates an empty grant on `budgets`.
    pub(crate) fn of(budgets: Vec<Arc<MemoryBudget>>) -> Self {
        Self { budgets, bytes: 0 }
    }

    /// Grows or shrinks the grant to `bytes`.
    ///
    /// # Errors
    /// `Retry` if a budget is exhausted; the grant is unchanged.
    pub(crate) fn resize(&mut self, bytes: usize) -> Result<()> {
        let more = bytes.saturating_sub(self.bytes);
        for at in 0..self.budgets.len() {
            if !self.budgets[at].try_reserve(more) {
                self.budgets[..at].iter().for_each(|budget| budget.release(more));
                return Err(Error::retry(
                    "the store's owner has too many long messages: pass fewer keys at a time",
                )
                .with("bytes", bytes));
            }
        }
        let less = self.bytes.saturating_sub(bytes);
        self.budgets.iter().for_each(|budget| budget.release(less));
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.budgets.iter().for_each(|budget| budget.release(self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grants_are_bounded_and_returned() {
        let (all, own) = (MemoryBudget::new(100), MemoryBudget::new(60));
        let left = || (all.0.load(Ordering::Relaxed), own.0.load(Ordering::Relaxed));
        let mut one = Grant::of(vec![Arc::clone(&all), Arc::clone(&own)]);
        let mut two = Grant::of(vec![Arc::clone(&all), MemoryBudget::new(60)]);
        one.resize(50).unwrap();
        assert!(one.resize(61).unwrap_err().to_string().contains("fewer keys"));
        two.resize(50).unwrap();
        assert!(one.resize(55).is_err(), "the shared budget is exhausted");
        assert_eq!(left(), (0, 10));
        one.resize(20).unwrap();
        assert_eq!(left(), (30, 40));
        drop((one, two));
        assert_eq!(left(), (100, 60));
    }
}

//! The lock and the counter of [`crate::rounds`]: from `parking_lot` and the standard library, or
//! from `loom` with the feature `loom`, for models in `tests/loom_*.rs`.

pub(crate) use std::sync::atomic::Ordering;

#[cfg(not(feature = "loom"))]
pub(crate) use parking_lot::{Mutex, MutexGuard};
#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::atomic::AtomicU64;

#[cfg(feature = "loom")]
pub(crate) use loom::sync::{MutexGuard, atomic::AtomicU64};
#[cfg(feature = "loom")]
pub(crate) use model::Mutex;

#[cfg(feature = "loom")]
mod model {
    use loom::sync::MutexGuard;
    use std::sync::PoisonError;
    use std::time::Instant;

    /// `loom`'s lock with `parking_lot`'s signatures. Lock poisoning needs no handling, because the
    /// panic that poisons a lock fails the model.
    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        /// Tries the lock once if `deadline` has passed, and otherwise waits without a limit: time
        /// does not pass in a model.
        pub(crate) fn try_lock_until(&self, deadline: Instant) -> Option<MutexGuard<'_, T>> {
            if deadline <= Instant::now() {
                return self.0.try_lock().ok();
            }
            Some(self.0.lock().unwrap_or_else(PoisonError::into_inner))
        }
    }
}

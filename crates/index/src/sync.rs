//! The locks and atomics of this crate: from `parking_lot` and the standard library, or from `loom`
//! with the feature `loom`, for models in `tests/loom_*.rs`.

#[cfg(not(feature = "loom"))]
pub(crate) use parking_lot::{Mutex, MutexGuard, RwLock};
#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

#[cfg(feature = "loom")]
pub(crate) use model::{Mutex, MutexGuard, RwLock};
#[cfg(feature = "loom")]
pub(crate) use std::sync::atomic::Ordering;

#[cfg(feature = "loom")]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64};

#[cfg(feature = "loom")]
mod model {
    //! The locks of `loom` with the signatures of `parking_lot`. A lock that a panic poisoned is
    //! taken nevertheless, except by `try_lock`: the panic fails the model in any case.

    pub(crate) use loom::sync::MutexGuard;
    use loom::sync::{RwLockReadGuard, RwLockWriteGuard};
    use std::sync::PoisonError;

    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }
        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }

    #[derive(Debug)]
    pub(crate) struct RwLock<T>(loom::sync::RwLock<T>);

    impl<T> RwLock<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::RwLock::new(value))
        }
        pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
            self.0.read().unwrap_or_else(PoisonError::into_inner)
        }
        pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
            self.0.write().unwrap_or_else(PoisonError::into_inner)
        }
    }
}

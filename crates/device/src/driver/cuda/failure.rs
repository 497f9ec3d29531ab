//! Whether the context of a device has failed, so that it runs no work any longer.

use super::symbols::Code;
use cudarc::driver::sys::CUresult;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Errors after which the context runs no work any longer: every later call returns the same error,
/// also the calls of the engine, which uses the same context.
const FAILURES: [Code; 17] = [
    CUresult::CUDA_ERROR_DEINITIALIZED as Code,
    CUresult::CUDA_ERROR_ECC_UNCORRECTABLE as Code,
    CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE as Code,
    CUresult::CUDA_ERROR_CONTAINED as Code,
    CUresult::CUDA_ERROR_ILLEGAL_ADDRESS as Code,
    CUresult::CUDA_ERROR_LAUNCH_TIMEOUT as Code,
    CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED as Code,
    CUresult::CUDA_ERROR_ASSERT as Code,
    CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR as Code,
    CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION as Code,
    CUresult::CUDA_ERROR_MISALIGNED_ADDRESS as Code,
    CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE as Code,
    CUresult::CUDA_ERROR_INVALID_PC as Code,
    CUresult::CUDA_ERROR_LAUNCH_FAILED as Code,
    CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK as Code,
    CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED as Code,
    CUresult::CUDA_ERROR_EXTERNAL_DEVICE as Code,
];

/// Time for which every query reported to [`Failure::note_query`] must fail before the context
/// counts as failed. Moves then end with an error although their copies may still run. The engine
/// cannot use their blocks, because its own calls to the context fail too.
const SILENCE: Duration = Duration::from_secs(5);

/// Whether a context has failed, as far as its calls have shown.
#[derive(Debug, Default)]
pub(super) struct Failure {
    has_failed: AtomicBool,
    /// Time of the first failure since the last success reported to [`Failure::note_query`].
    silent_since: Mutex<Option<Instant>>,
}

impl Failure {
    pub(super) fn is_known(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// Notes the result of a call, and returns it.
    pub(super) fn note(&self, code: Code) -> Code {
        if FAILURES.contains(&code) {
            self.has_failed.store(true, Ordering::Relaxed);
        }
        code
    }

    /// Notes whether a query succeeded. The query must be one that succeeds in a working context.
    pub(super) fn note_query(&self, succeeded: bool) {
        let mut since = self.silent_since.lock();
        if succeeded {
            *since = None;
        } else if since.get_or_insert_with(Instant::now).elapsed() >= SILENCE {
            self.has_failed.store(true, Ordering::Relaxed);
        }
    }
}

//! The functions of the CUDA driver library that this crate calls, resolved by name.
//!
//! The crate `cudarc` supplies types and constants. Its functions are not used: they look a symbol
//! up on first use and panic if it is missing, and they return an error code as an enum, which is
//! undefined behaviour for a code of a newer driver.

#![allow(non_snake_case, reason = "the names of the driver's functions")]

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUjit_option, CUmemcpyAttributes,
    CUmodule, CUstream,
};
use libloading::Library;
use ritornello_format::{Error, Result};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// A `CUresult`.
pub(super) type Code = c_uint;
/// A `CUdevice_attribute`.
pub(super) type Attribute = c_uint;

macro_rules! symbols {
    ($($name:ident($($argument:ty),* $(,)?);)*) => {
        /// The functions that every driver must have.
        pub(super) struct Symbols {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> Code,)*
        }

        impl Symbols {
            /// Resolves all functions.
            ///
            /// # Errors
            /// `Invalid` if the library lacks a function; the context names all missing functions.
            ///
            /// # Safety
            /// `library` is a CUDA driver library, and is never unloaded.
            pub(super) unsafe fn resolve(library: &Library) -> Result<Self> {
                let mut missing = Vec::new();
                $(
                    // SAFETY: the signature is the one of `cuda.h` since CUDA 11.
                    let symbol = unsafe { library.get(concat!(stringify!($name), "\0")) };
                    let $name = symbol.map(|symbol| *symbol);
                    if $name.is_err() {
                        missing.push(stringify!($name));
                    }
                )*
                match ($($name,)*) {
                    ($(Ok($name),)*) => Ok(Self { $($name,)* }),
                    _ => Err(Error::invalid(
                        "the CUDA driver lacks functions: install driver release 550 or later",
                    )
                    .with("missing", missing.join(" "))),
                }
            }
        }
    };
}

symbols! {
    cuInit(c_uint);
    cuDriverGetVersion(*mut c_int);
    cuGetErrorName(Code, *mut *const c_char);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetName(*mut c_char, c_int, CUdevice);
    cuDeviceGetAttribute(*mut c_int, Attribute, CUdevice);
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuDevicePrimaryCtxRelease_v2(CUdevice);
    cuCtxPushCurrent_v2(CUcontext);
    cuCtxPopCurrent_v2(*mut CUcontext);
    cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
    cuModuleLoadDataEx(*mut CUmodule, *const c_void, c_uint, *mut CUjit_option, *mut *mut c_void);
    cuModuleUnload(CUmodule);
    cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
    cuMemHostGetDevicePointer_v2(*mut CUdeviceptr, *mut c_void, c_uint);
    cuMemGetAddressRange_v2(*mut CUdeviceptr, *mut usize, CUdeviceptr);
    cuMemAlloc_v2(*mut CUdeviceptr, usize);
    cuMemFree_v2(CUdeviceptr);
    cuMemcpyAsync(CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
    cuStreamDestroy_v2(CUstream);
    cuStreamWaitEvent(CUstream, CUevent, c_uint);
    cuEventCreate(*mut CUevent, c_uint);
    cuEventDestroy_v2(CUevent);
    cuEventRecord(CUevent, CUstream);
    cuEventQuery(CUevent);
    cuLaunchKernel(
        CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
        *mut *mut c_void, *mut *mut c_void,
    );
}

/// `cuMemcpyBatchAsync` as CUDA 12.8 defines it: targets, sources, lengths, the number of copies,
/// attributes, the index of the first copy with each attribute, the number of attributes, the index
/// of the copy that failed, and the stream. Later drivers keep this function beside
/// `cuMemcpyBatchAsync_v2`.
pub(super) type CopyBatch = unsafe extern "C" fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut CUmemcpyAttributes,
    *mut usize,
    usize,
    *mut usize,
    CUstream,
) -> Code;

/// Resolves `cuMemcpyBatchAsync`; `None` if the driver is too old to have it.
///
/// # Safety
/// `library` is a CUDA driver library, and is never unloaded.
pub(super) unsafe fn copy_batch(library: &Library) -> Option<CopyBatch> {
    // SAFETY: the signature is the one of `cuda.h` of CUDA 12.8.
    unsafe { library.get::<CopyBatch>("cuMemcpyBatchAsync\0") }.ok().map(|symbol| *symbol)
}

//! The CUDA driver, loaded when a device is opened. Nothing of CUDA is linked.

mod failure;
mod symbols;

use super::{Copies, Driver, Launch, Priority, RawEvent, RawStream};
use crate::layout::Kernel;
use cudarc::driver::sys::{
    CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE, CUcontext, CUdevice,
    CUdevice_attribute, CUdeviceptr, CUevent, CUevent_flags, CUfunction, CUjit_option,
    CUmemLocation, CUmemLocationType, CUmemcpyAttributes, CUmemcpyFlags, CUmemcpySrcAccessOrder,
    CUmodule, CUresult, CUstream, CUstream_flags,
};
use failure::Failure;
use libloading::Library;
use ritornello_format::{Error, Result};
use std::error::Error as StdError;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use symbols::{Code, CopyBatch, Symbols};

const SUCCESS: Code = CUresult::CUDA_SUCCESS as Code;
const NOT_READY: Code = CUresult::CUDA_ERROR_NOT_READY as Code;
const ALREADY_REGISTERED: Code = CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED as Code;

/// Oldest supported version of the driver's interface: 1000 * major + 10 * minor. A driver older
/// than 12.4 cannot load the kernels: all moves then use the copy engines.
const VERSION_MIN: c_int = 12_000;
/// First version that has the batched copy with the signature of [`CopyBatch`].
const VERSION_OF_BATCH: c_int = 12_080;
/// Threads of a block, as `kv.cu` demands.
const THREADS: c_uint = 1024;
/// Maximum allocations that a checked range may consist of: enough for 128 GiB in chunks of 2 MiB.
const CHUNKS_MAX: usize = 65_536;
/// The kernels of `kernels/kv.cu`, compiled to PTX. The driver expects a string that ends with a
/// NUL byte.
const PTX: &str = concat!(include_str!("../../kernels/kv.ptx"), "\0");

struct Kernels {
    module: CUmodule,
    functions: [CUfunction; Kernel::NAMES.len()],
}

/// A device of the CUDA driver, in the primary context, which PyTorch uses as well.
pub struct Cuda {
    symbols: Symbols,
    copy_batch: Option<CopyBatch>,
    device: CUdevice,
    context: CUcontext,
    kernels: Option<Kernels>,
    name: String,
    version: c_int,
    process: u32,
    failure: Failure,
    /// An event that is never recorded, so that its query succeeds in a working context.
    idle: RawEvent,
}

// SAFETY: handles of the driver may be used from any thread; every call makes the context current
// on its thread.
unsafe impl Send for Cuda {}
// SAFETY: as for `Send`.
unsafe impl Sync for Cuda {}

impl Cuda {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// `Invalid` if the driver is missing, too old, incomplete or cannot start, the device does not
    /// exist, or it cannot map host memory; `Fatal` if another call of the driver fails.
    pub fn open(ordinal: u32) -> Result<Self> {
        let names = ["libcuda.so.1", "libcuda.so"].map(PathBuf::from);
        // SAFETY: libraries of these names are CUDA's.
        unsafe { Self::open_library(&names, ordinal) }
    }

    /// Opens device `ordinal` by the first library in `names` that can be loaded.
    ///
    /// # Errors
    /// Returns the errors of [`Cuda::open`].
    ///
    /// # Safety
    /// The libraries behave as CUDA's driver does.
    pub unsafe fn open_library(names: &[impl AsRef<Path>], ordinal: u32) -> Result<Self> {
        let mut refusal = None;
        let library = names.iter().find_map(|name| {
            // SAFETY: CUDA's driver may be loaded at any time.
            let loaded = unsafe { Library::new(name.as_ref()) };
            // Report the error of the first name, which is the usual name.
            loaded.map_err(|error| refusal = refusal.take().or(Some(error))).ok()
        });
        let Some(library) = library else {
            let cause = refusal.as_ref().and_then(StdError::source).map(ToString::to_string);
            return Err(Error::invalid(
                "the CUDA driver cannot be loaded: install driver release 550 or later",
            )
            .with("cause", cause.unwrap_or_default()));
        };
        // The driver starts threads, so it must not be unloaded.
        let library: &'static Library = Box::leak(Box::new(library));
        // SAFETY: `library` is leaked, and the caller vouches for its functions.
        let symbols = unsafe { Symbols::resolve(library) }?;
        let (mut version, mut count) = (0, 0);
        // SAFETY: the pointers lead to local variables.
        unsafe {
            symbols.check("cuInit", (symbols.cuInit)(0)).map_err(|error| {
                Error::invalid("the CUDA driver cannot start: run nvidia-smi to see why")
                    .because(error)
            })?;
            symbols.check("cuDriverGetVersion", (symbols.cuDriverGetVersion)(&mut version))?;
            symbols.check("cuDeviceGetCount", (symbols.cuDeviceGetCount)(&mut count))?;
        }
        if version < VERSION_MIN {
            return Err(Error::invalid(
                "the CUDA driver is too old: install driver release 550 or later",
            )
            .with("version", version));
        }
        if c_int::try_from(ordinal).map_or(true, |ordinal| ordinal >= count) {
            return Err(Error::invalid(
                "the CUDA driver has no device with this number: check CUDA_VISIBLE_DEVICES",
            )
            .with("device", ordinal)
            .with("devices", count));
        }
        // SAFETY: `library` is leaked, and the caller vouches for its functions.
        let copy_batch = unsafe { symbols::copy_batch(library) };
        let copy_batch = copy_batch.filter(|_| version >= VERSION_OF_BATCH);
        Self::open_device(symbols, copy_batch, ordinal, version)
    }

    fn open_device(
        symbols: Symbols,
        copy_batch: Option<CopyBatch>,
        ordinal: u32,
        version: c_int,
    ) -> Result<Self> {
        let (mut device, mut context, mut maps) = (0, null_mut(), 0);
        let mut name: [c_char; 128] = [0; 128];
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY as c_uint;
        // SAFETY: the pointers lead to local variables of the lengths that are passed.
        unsafe {
            symbols.check("cuDeviceGet", (symbols.cuDeviceGet)(&mut device, ordinal as c_int))?;
            let named =
                (symbols.cuDeviceGetName)(name.as_mut_ptr(), name.len() as c_int - 1, device);
            symbols.check("cuDeviceGetName", named)?;
            let code = (symbols.cuDeviceGetAttribute)(&mut maps, attribute, device);
            symbols.check("cuDeviceGetAttribute", code)?;
        }
        if maps == 0 {
            return Err(Error::invalid("the device cannot map host memory: use another device")
                .with("device", ordinal));
        }
        // SAFETY: the pointer leads to a local variable.
        let retained = unsafe { (symbols.cuDevicePrimaryCtxRetain)(&mut context, device) };
        symbols.check("cuDevicePrimaryCtxRetain", retained)?;
        // SAFETY: the array is zero from the driver's string to its end.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let process = std::process::id();
        let mut cuda = Self {
            symbols,
            copy_batch,
            device,
            context,
            kernels: None,
            name,
            version,
            process,
            failure: Failure::default(),
            idle: RawEvent(0),
        };
        cuda.idle = cuda.create_event()?;
        match cuda.load_kernels() {
            Ok(kernels) => cuda.kernels = Some(kernels),
            Err(error) => tracing::warn!(
                %error,
                "the kernels do not load, so the device copies without them, which is slow for \
                 pieces below 32 KiB"
            ),
        }
        Ok(cuda)
    }

    fn load_kernels(&self) -> Result<Kernels> {
        let mut log = vec![0_u8; 4096];
        let mut options = [
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        // The driver takes the length as a value in the place of a pointer. The last byte of the
        // buffer stays zero.
        let length = std::ptr::without_provenance_mut(log.len() - 1);
        let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), length];
        let mut module = null_mut();
        let loaded = self.call("cuModuleLoadDataEx", |symbols| {
            // SAFETY: the image is a terminated string, and both arrays have two entries.
            unsafe {
                (symbols.cuModuleLoadDataEx)(
                    &mut module,
                    PTX.as_ptr().cast(),
                    options.len() as c_uint,
                    options.as_mut_ptr(),
                    values.as_mut_ptr(),
                )
            }
        });
        loaded.map_err(|error| {
            let end = log.iter().position(|&byte| byte == 0).unwrap_or(0);
            error.with("log", String::from_utf8_lossy(&log[..end]).trim())
        })?;
        let mut functions = [null_mut(); Kernel::NAMES.len()];
        for (function, name) in functions.iter_mut().zip(Kernel::NAMES) {
            let name = CString::new(name).unwrap_or_default();
            // SAFETY: the module is loaded, and the name is a terminated string.
            self.call("cuModuleGetFunction", |symbols| unsafe {
                (symbols.cuModuleGetFunction)(function, module, name.as_ptr())
            })?;
        }
        Ok(Kernels { module, functions })
    }

    /// Runs `call` with the context current on this thread.
    fn call(&self, name: &'static str, call: impl FnOnce(&Symbols) -> Code) -> Result<()> {
        let code = self.code(name, call)?;
        self.symbols.check(name, code)
    }

    /// Runs `call` with the context current on this thread, and returns its code.
    fn code(&self, name: &'static str, call: impl FnOnce(&Symbols) -> Code) -> Result<Code> {
        if self.process != std::process::id() {
            return Err(Error::fatal(
                "a forked process cannot use the device of its parent: start workers by spawn",
            )
            .with("call", name));
        }
        // SAFETY: the context exists until `drop`.
        let pushed = unsafe { (self.symbols.cuCtxPushCurrent_v2)(self.context) };
        self.symbols.check("cuCtxPushCurrent", self.failure.note(pushed))?;
        let code = self.failure.note(call(&self.symbols));
        let mut popped = null_mut();
        // SAFETY: pushed above.
        let restored = unsafe { (self.symbols.cuCtxPopCurrent_v2)(&mut popped) };
        self.symbols.check("cuCtxPopCurrent", restored)?;
        Ok(code)
    }

    /// Number of bytes from `address` to the end of the allocation that contains it.
    fn allocated_from(&self, address: u64) -> Result<u64> {
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: the pointers lead to local variables.
        self.call("cuMemGetAddressRange", |symbols| unsafe {
            (symbols.cuMemGetAddressRange_v2)(&mut base, &mut bytes, address)
        })?;
        Ok((base + bytes as u64).saturating_sub(address))
    }
}

impl Symbols {
    /// Returns an error with the name of the call and the name of `code`, unless `code` is success.
    fn check(&self, call: &'static str, code: Code) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut name = null();
        // SAFETY: the driver stores the address of a constant string, or returns an error.
        let known = unsafe { (self.cuGetErrorName)(code, &mut name) } == SUCCESS && !name.is_null();
        let name = if known {
            // SAFETY: the driver's strings are terminated and never freed.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        } else {
            "unknown".into()
        };
        Err(Error::fatal("a call of the CUDA driver failed")
            .with("call", call)
            .with("code", code)
            .with("name", name))
    }
}

fn stream_of(stream: RawStream) -> CUstream {
    std::ptr::with_exposed_provenance_mut(stream.0 as usize)
}

fn event_of(event: RawEvent) -> CUevent {
    std::ptr::with_exposed_provenance_mut(event.0 as usize)
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda")
            .field("name", &self.name)
            .field("version", &self.version)
            .field("has_kernels", &self.kernels.is_some())
            .field("has_batch", &self.copy_batch.is_some())
            .finish_non_exhaustive()
    }
}

impl Driver for Cuda {
    fn describe(&self) -> String {
        let (major, minor) = (self.version / 1000, self.version % 1000 / 10);
        format!("{}, driver for CUDA {major}.{minor}", self.name)
    }

    fn has_kernels(&self) -> bool {
        self.kernels.is_some()
    }

    fn has_failed(&self) -> bool {
        if !self.failure.is_known() {
            // SAFETY: the event exists until `drop`.
            self.failure.note_query(unsafe { self.is_complete(self.idle) }.is_ok());
        }
        self.failure.is_known()
    }

    unsafe fn pin(&self, base: *mut u8, bytes: usize) -> Result<u64> {
        let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
        let code = self.code("cuMemHostRegister", |symbols| {
            // SAFETY: the memory is mapped, promised by the caller.
            unsafe { (symbols.cuMemHostRegister_v2)(base.cast(), bytes, flags) }
        })?;
        if code == ALREADY_REGISTERED {
            return Err(Error::invalid("the memory is pinned already").with("bytes", bytes));
        }
        self.symbols.check("cuMemHostRegister", code).map_err(|error| {
            Error::retry(
                "the CUDA driver refuses to pin memory: raise the limit of locked memory \
                 (`ulimit -l`), or the memory limit of the container",
            )
            .with("bytes", bytes)
            .because(error)
        })?;
        let mut address = 0;
        let mapped = self.call("cuMemHostGetDevicePointer", |symbols| {
            // SAFETY: registered above.
            unsafe { (symbols.cuMemHostGetDevicePointer_v2)(&mut address, base.cast(), 0) }
        });
        match mapped {
            Ok(()) => Ok(address),
            Err(error) => {
                // SAFETY: registered above, and used by no work.
                unsafe { self.unpin(base) }?;
                Err(error)
            }
        }
    }

    unsafe fn unpin(&self, base: *mut u8) -> Result<()> {
        // SAFETY: promised by the caller.
        self.call("cuMemHostUnregister", |symbols| unsafe {
            (symbols.cuMemHostUnregister)(base.cast())
        })
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let mut address = 0;
        // SAFETY: the pointer leads to a local variable.
        let allocated = self.call("cuMemAlloc", |symbols| unsafe {
            (symbols.cuMemAlloc_v2)(&mut address, bytes.max(1))
        });
        allocated.map_err(|error| {
            Error::retry("the device has too little free memory: let the engine take less of it")
                .with("bytes", bytes)
                .because(error)
        })?;
        Ok(address)
    }

    unsafe fn free(&self, address: u64) -> Result<()> {
        // SAFETY: promised by the caller.
        self.call("cuMemFree", |symbols| unsafe { (symbols.cuMemFree_v2)(address) })
    }

    fn check_memory(&self, base: u64, bytes: u64) -> Result<()> {
        let refused = |error: Error| {
            Error::invalid(
                "the memory of a pool is not allocated on the device: pass memory of this device",
            )
            .with("base", base)
            .with("bytes", bytes)
            .because(error)
        };
        let mut checked = 0;
        // Memory that is mapped in chunks (PyTorch's expandable segments) is checked chunk by
        // chunk.
        for _ in 0..CHUNKS_MAX {
            match self.allocated_from(base + checked).map_err(refused)? {
                0 => break,
                more => checked = checked.saturating_add(more),
            }
            if checked >= bytes {
                return Ok(());
            }
        }
        let text = "the memory is not contiguous, or consists of too many allocations";
        Err(refused(Error::invalid(text).with("checked", checked)))
    }

    fn create_stream(&self, priority: Priority) -> Result<RawStream> {
        let (mut least, mut greatest) = (0, 0);
        let mut stream = null_mut();
        // SAFETY: the pointers lead to local variables.
        self.call("cuCtxGetStreamPriorityRange", |symbols| unsafe {
            (symbols.cuCtxGetStreamPriorityRange)(&mut least, &mut greatest)
        })?;
        let priority = match priority {
            Priority::High => greatest,
            Priority::Low => least,
        };
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: the pointer leads to a local variable.
        self.call("cuStreamCreateWithPriority", |symbols| unsafe {
            (symbols.cuStreamCreateWithPriority)(&mut stream, flags, priority)
        })?;
        Ok(RawStream(stream.expose_provenance() as u64))
    }

    unsafe fn destroy_stream(&self, stream: RawStream) {
        // SAFETY: promised by the caller.
        let destroyed = self.call("cuStreamDestroy", |symbols| unsafe {
            (symbols.cuStreamDestroy_v2)(stream_of(stream))
        });
        if let Err(error) = destroyed {
            tracing::warn!(%error, "a stream of the device could not be destroyed");
        }
    }

    fn create_event(&self) -> Result<RawEvent> {
        let mut event = null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        // SAFETY: the pointer leads to a local variable.
        self.call("cuEventCreate", |symbols| unsafe {
            (symbols.cuEventCreate)(&mut event, flags)
        })?;
        Ok(RawEvent(event.expose_provenance() as u64))
    }

    unsafe fn destroy_event(&self, event: RawEvent) {
        // SAFETY: promised by the caller.
        let destroyed = self.call("cuEventDestroy", |symbols| unsafe {
            (symbols.cuEventDestroy_v2)(event_of(event))
        });
        if let Err(error) = destroyed {
            tracing::warn!(%error, "an event of the device could not be destroyed");
        }
    }

    unsafe fn record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        // SAFETY: promised by the caller.
        self.call("cuEventRecord", |symbols| unsafe {
            (symbols.cuEventRecord)(event_of(event), stream_of(stream))
        })
    }

    unsafe fn wait(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        // SAFETY: promised by the caller.
        self.call("cuStreamWaitEvent", |symbols| unsafe {
            (symbols.cuStreamWaitEvent)(stream_of(stream), event_of(event), 0)
        })
    }

    unsafe fn is_complete(&self, event: RawEvent) -> Result<bool> {
        // SAFETY: promised by the caller.
        let code = self
            .code("cuEventQuery", |symbols| unsafe { (symbols.cuEventQuery)(event_of(event)) })?;
        if code == NOT_READY {
            return Ok(false);
        }
        self.symbols.check("cuEventQuery", code).map(|()| true)
    }

    unsafe fn copy(&self, stream: RawStream, copies: &Copies) -> Result<()> {
        if copies.is_empty() {
            return Ok(());
        }
        let Some(copy_batch) = self.copy_batch else {
            return self.call("cuMemcpyAsync", |symbols| {
                let mut copies = copies.iter().map(|(to, from, bytes)| {
                    // SAFETY: promised by the caller.
                    unsafe { (symbols.cuMemcpyAsync)(to, from, bytes, stream_of(stream)) }
                });
                copies.find(|&code| code != SUCCESS).unwrap_or(SUCCESS)
            });
        };
        // Locations are hints for managed memory, which this crate does not copy.
        let nowhere =
            CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = CUmemcpyAttributes {
            srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: CUmemcpyFlags::CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE as c_uint,
        };
        let (to, from, bytes) = copies.columns();
        let (mut first, mut failed) = (0, usize::MAX);
        let copied = self.call("cuMemcpyBatchAsync", |_| {
            // SAFETY: the caller promised the copies; the driver reads the arrays and returns the
            // index of a copy that failed.
            unsafe {
                copy_batch(
                    to.as_ptr().cast_mut(),
                    from.as_ptr().cast_mut(),
                    bytes.as_ptr().cast_mut(),
                    bytes.len(),
                    &mut attributes,
                    &mut first,
                    1,
                    &mut failed,
                    stream_of(stream),
                )
            }
        });
        copied.map_err(|error| match failed {
            usize::MAX => error,
            failed => error.with("copy", failed),
        })
    }

    unsafe fn launch(&self, stream: RawStream, launch: &Launch) -> Result<()> {
        let Some(kernels) = &self.kernels else {
            return Err(Error::fatal("the kernels of the device did not load"));
        };
        let function = kernels.functions[launch.kernel.index()];
        let Launch { mut spans, mut count, mut units, mut moves, mut pages, mut arena, .. } =
            *launch;
        // The arguments have the order and the types of the kernels' parameters in `kv.cu`.
        let mut arguments: [*mut c_void; 6] = [
            (&raw mut spans).cast(),
            (&raw mut count).cast(),
            (&raw mut units).cast(),
            (&raw mut moves).cast(),
            (&raw mut pages).cast(),
            (&raw mut arena).cast(),
        ];
        self.call("cuLaunchKernel", |symbols| {
            // SAFETY: the function takes these six arguments, which the driver copies; the caller
            // promised the addresses in them.
            unsafe {
                (symbols.cuLaunchKernel)(
                    function,
                    launch.grid,
                    1,
                    1,
                    THREADS,
                    1,
                    1,
                    0,
                    stream_of(stream),
                    arguments.as_mut_ptr(),
                    null_mut(),
                )
            }
        })
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        if let Some(kernels) = self.kernels.take() {
            // SAFETY: loaded by this value.
            let unloaded = self.call("cuModuleUnload", |symbols| unsafe {
                (symbols.cuModuleUnload)(kernels.module)
            });
            if let Err(error) = unloaded {
                tracing::warn!(%error, "the kernels could not be unloaded from the device");
            }
        }
        if self.idle != RawEvent(0) {
            // SAFETY: created by this value, and no longer used.
            unsafe { self.destroy_event(self.idle) };
        }
        // SAFETY: retained by this value.
        let released = unsafe { (self.symbols.cuDevicePrimaryCtxRelease_v2)(self.device) };
        if let Err(error) = self.symbols.check("cuDevicePrimaryCtxRelease", released) {
            tracing::warn!(%error, "the context of the device could not be released");
        }
    }
}

const _: () = assert!(size_of::<CUdeviceptr>() == size_of::<u64>());

//! Compiles and loads the fake CUDA library in `libcuda.cpp`.

use libloading::Library;
use ritornello_device::driver::cuda::Cuda;
use ritornello_format::Result;
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_long};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// The bytes of the compiled libraries, by the macro with which each was compiled.
static BUILDS: Mutex<Option<HashMap<String, Vec<u8>>>> = Mutex::new(None);

/// A copy of the library with separate state.
pub struct FakeCuda {
    path: PathBuf,
    library: Library,
    _folder: tempfile::TempDir,
}

impl FakeCuda {
    /// Loads the library: without the functions that the macro `part` removes, or with `part`
    /// broken; unchanged if `part` is empty.
    pub fn new(part: &str) -> Self {
        let is_macro = ["NO_SYMBOL", "NO_BATCH"].contains(&part);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libcuda.so.1");
        let mut builds = BUILDS.lock().unwrap_or_else(PoisonError::into_inner);
        let key = if is_macro { part } else { "WHOLE" };
        let builds = builds.get_or_insert_default();
        let bytes = builds.entry(key.into()).or_insert_with(|| compile(key, &path));
        std::fs::write(&path, bytes).unwrap();
        // SAFETY: the library runs no code when it is loaded, except constructors of empty
        // containers.
        let library = unsafe { Library::new(&path) }.unwrap();
        let fake = Self { path, library, _folder: folder };
        if !is_macro {
            let part = CString::new(part).unwrap();
            // SAFETY: the function in `libcuda.cpp` has this signature.
            unsafe {
                let symbol =
                    fake.library.get::<unsafe extern "C" fn(*const c_char)>("fake_break\0");
                symbol.unwrap()(part.as_ptr());
            }
        }
        fake
    }

    /// Opens device `ordinal`.
    pub fn open(&self, ordinal: u32) -> Result<Cuda> {
        // SAFETY: the library behaves as a driver.
        unsafe { Cuda::open_library(&[&self.path], ordinal) }
    }

    /// Makes the device fail after `moves` moves.
    pub fn fail_after(&self, moves: c_long) {
        // SAFETY: the function in `libcuda.cpp` has this signature.
        unsafe {
            let symbol = self.library.get::<unsafe extern "C" fn(c_long)>("fake_fail_after\0");
            symbol.unwrap()(moves);
        }
    }

    /// Number of existing resources of a kind, or number of batches of copies if `what` is
    /// "batches".
    pub fn count(&self, what: &str) -> c_int {
        let what = CString::new(what).unwrap();
        // SAFETY: the function in `libcuda.cpp` has this signature.
        unsafe {
            let symbol =
                self.library.get::<unsafe extern "C" fn(*const c_char) -> c_int>("fake_count\0");
            symbol.unwrap()(what.as_ptr())
        }
    }
}

/// Compiles the library to `path`, with the macro `name` defined. Returns its bytes.
fn compile(name: &str, path: &Path) -> Vec<u8> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake/libcuda.cpp");
    let built = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "g++".into()))
        .args(["-shared", "-fPIC", "-O1", "-std=c++17", "-Wno-unknown-pragmas"])
        .arg(format!("-D{name}"))
        .arg("-o")
        .args([path, &source])
        .status()
        .unwrap();
    assert!(built.success(), "{} does not compile", source.display());
    std::fs::read(path).unwrap()
}

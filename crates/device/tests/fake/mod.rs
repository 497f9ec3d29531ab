//! Compiles and loads the fake CUDA library in `libcuda.cpp`.

use libloading::Library;
use ritornello_device::driver::cuda::Cuda;
use ritornello_format::Result;
use std::ffi::{CString, c_char, c_int, c_long};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The bytes of the compiled library.
static BUILD: OnceLock<Vec<u8>> = OnceLock::new();

/// A copy of the library with separate state.
pub struct FakeCuda {
    path: PathBuf,
    library: Library,
    _folder: tempfile::TempDir,
}

impl FakeCuda {
    /// Loads the library with `part` broken: a name that `libcuda.cpp` passes to `is_broken`, such
    /// as `NO_MODULE`; or `RECORD N`, with which `cuEventRecord` fails with the code N. If `part`
    /// is empty, no part is broken.
    pub fn new(part: &str) -> Self {
        let fake = Self::without(&[]);
        fake.break_part(part);
        fake
    }

    /// Loads the library; lookups do not find `functions` in it.
    pub fn without(functions: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libcuda.so.1");
        let mut bytes = BUILD.get_or_init(|| compile(&path)).clone();
        functions.iter().for_each(|name| rename(&mut bytes, name));
        std::fs::write(&path, bytes).unwrap();
        // SAFETY: the library runs no code when it is loaded, except constructors of empty
        // containers.
        let library = unsafe { Library::new(&path) }.unwrap();
        Self { path, library, _folder: folder }
    }

    /// Breaks `part` instead of the part that is broken; repairs the library if `part` is empty.
    pub fn break_part(&self, part: &str) {
        let part = CString::new(part).unwrap();
        // SAFETY: the function in `libcuda.cpp` has this signature.
        unsafe {
            let symbol = self.library.get::<unsafe extern "C" fn(*const c_char)>("fake_break\0");
            symbol.unwrap()(part.as_ptr());
        }
    }

    /// Opens device `ordinal`.
    pub fn open(&self, ordinal: u32) -> Result<Cuda> {
        // SAFETY: the library behaves as a driver.
        unsafe { Cuda::open_library(&[&self.path], ordinal) }
    }

    /// Lets the next `moves` copies and launches succeed. The device fails at the copy or launch
    /// after them.
    pub fn fail_after(&self, moves: c_long) {
        // SAFETY: the function in `libcuda.cpp` has this signature.
        unsafe {
            let symbol = self.library.get::<unsafe extern "C" fn(c_long)>("fake_fail_after\0");
            symbol.unwrap()(moves);
        }
    }

    /// Number of existing resources of the kind `what`, such as "streams"; if `what` is "batches",
    /// number of batched copies so far.
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

/// Renames a function in the bytes of the library, so that a search for its name does not find it.
fn rename(bytes: &mut [u8], name: &str) {
    let stored = format!("\0{name}\0");
    let places: Vec<usize> = bytes
        .windows(stored.len())
        .enumerate()
        .filter_map(|(at, found)| (found == stored.as_bytes()).then_some(at))
        .collect();
    assert!(!places.is_empty(), "the fake library has no function {name}");
    places.into_iter().for_each(|at| bytes[at + 1] = b'_');
}

/// Compiles the library to `path`. Returns its bytes.
fn compile(path: &Path) -> Vec<u8> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake/libcuda.cpp");
    let built = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "g++".into()))
        .args(["-shared", "-fPIC", "-O1", "-std=c++17", "-Wno-unknown-pragmas"])
        .arg("-o")
        .args([path, &source])
        .status()
        .unwrap();
    assert!(built.success(), "{} does not compile", source.display());
    std::fs::read(path).unwrap()
}

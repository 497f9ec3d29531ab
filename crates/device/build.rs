//! Compiles the kernels for the CPU, if the feature `emulated` is enabled.

fn main() {
    println!("cargo::rerun-if-changed=kernels");
    #[cfg(feature = "emulated")]
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(3)
        .warnings_into_errors(true)
        .flag("-Wno-unknown-pragmas")
        .file("kernels/emulated.cpp")
        .compile("ritornello_kernels");
}

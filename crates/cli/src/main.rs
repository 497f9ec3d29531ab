//! The `ritornello` command as a program that is built without Python. `bench store --python` names
//! the interpreter that measures probes from Python.

#![forbid(unsafe_code)]

fn main() {
    std::process::exit(ritornello_cli::run(std::env::args().collect(), None));
}

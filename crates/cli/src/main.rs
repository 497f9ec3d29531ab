//! The `ritornello` command without Python: `bench store --python` names an interpreter for the
//! measurement that needs Python.

#![forbid(unsafe_code)]

fn main() {
    std::process::exit(ritornello_cli::run(std::env::args().collect(), None));
}

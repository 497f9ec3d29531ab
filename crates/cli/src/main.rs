//! The `ritornello` command without Python: `--python` names an interpreter for measurements that
//! need Python.

#![forbid(unsafe_code)]

fn main() {
    std::process::exit(ritornello_cli::run(std::env::args().collect(), None));
}

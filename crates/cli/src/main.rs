//! The `ritornello` command without Python: `--python` names an interpreter for measurements that
//! need one.

#![forbid(unsafe_code)]

fn main() {
    std::process::exit(ritornello_cli::run(std::env::args().collect(), None));
}

//! Compares the `run` index with `memory`, under random operations, reopens and crashes.

#![allow(dead_code, reason = "shared with other tests")]

mod common;

use common::{Pair, op};
use proptest::prelude::*;

proptest! {
    #![proptest_config(common::cases(192))]
    #[test]
    fn run_matches_memory(ops in prop::collection::vec(op(), 1..60)) {
        let mut pair = Pair::new();
        for op in &ops {
            pair.apply(op);
            pair.check(op);
        }
    }
}

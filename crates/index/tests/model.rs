//! The `run` index against `memory`, under random operations, with reopens and crashes.

#![cfg(not(loom))]
#![allow(dead_code, reason = "shared with other tests")]

mod common;

use common::{Pair, op};
use proptest::prelude::*;

proptest! {
    #![proptest_config(common::cases(192))]
    #[test]
    fn run_does_what_memory_does(ops in prop::collection::vec(op(), 1..60)) {
        let mut pair = Pair::new();
        for op in &ops {
            pair.apply(op);
            pair.check(op);
        }
    }
}

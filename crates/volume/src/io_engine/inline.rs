//! The engine without concurrency: one operation at a time, on the calling thread. This engine is
//! used for simulated files, where segments are mapped, for self-tests, and for a call that cannot
//! make an `io_uring`.

use super::{Abandoned, IoEngine, Op, OpQueue, Work, drive};
use std::io;
use std::time::Duration;

#[derive(Debug)]
pub(crate) struct Inline;

impl IoEngine for Inline {
    fn run(&self, work: &mut dyn Work) -> Duration {
        drive(&mut Completed(Vec::new()), work)
    }
    fn name(&self) -> &'static str {
        "inline"
    }
}

/// Completed operations. Every operation completes when it is submitted.
struct Completed(Vec<(u64, io::Result<()>)>);

impl OpQueue for Completed {
    fn has_room(&self) -> bool {
        self.0.is_empty()
    }
    fn submit(&mut self, mut op: Op) {
        let result = op.perform();
        self.0.push((op.tag, result));
    }
    fn in_flight(&self) -> usize {
        self.0.len()
    }
    fn reap(&mut self, _: Option<Duration>, ended: &mut Vec<(u64, io::Result<()>)>) {
        ended.append(&mut self.0);
    }
    fn abandon(&mut self, _: Abandoned) {
        // No operation is in flight: `submit` completed all operations.
    }
}

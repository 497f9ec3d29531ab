//! The pages that a crash during or after an operation may remove or leave.

use super::History;
use crate::common::MIB;
use crate::kinds::{KINDS, SEQUENCES_PER_KIND, leading, left_by_delete};
use crate::operation::Operation;

impl History {
    /// Widens the bounds, the pages that must and that may be present, before an operation begins,
    /// because a crash may interrupt the operation.
    pub(super) fn expect(&mut self, operation: &Operation) {
        match *operation {
            Operation::Put { at, pages, .. } => self.expect_put(at, pages),
            Operation::Resize { mib } => self.bounds.ceiling = self.bounds.ceiling.max(mib * MIB),
            Operation::Configure { kind, settings: ref request } => {
                self.bounds.limited[kind] |= request.quota_bytes.is_some();
                // The new settings may allow fewer retained pages, so any page of the scope may be
                // evicted.
                self.retained.retain(|(at, ..)| at / SEQUENCES_PER_KIND as usize != kind);
                self.bounds.retained.retain(|(at, _)| at / SEQUENCES_PER_KIND as usize != kind);
            }
            Operation::Delete { at, page } => {
                let left = left_by_delete(at, page);
                if self.workload.never_full {
                    self.bounds.least[at] &= left;
                    self.bounds.deleted[at] |= !left;
                }
                self.retained.retain(|retained| retained.0 != at);
                self.bounds.retained.retain(|retained| retained.0 != at);
                self.leased.retain(|leased| leased.1 != at);
            }
            Operation::DropScope { .. } | Operation::Clear => {
                if self.workload.never_full {
                    let kinds = match *operation {
                        Operation::DropScope { kind } => kind..kind + 1,
                        _ => 0..KINDS,
                    };
                    let of = |kind: usize| kind * SEQUENCES_PER_KIND as usize;
                    self.bounds.least[of(kinds.start)..of(kinds.end)].fill(0);
                }
                self.retained.clear();
                self.bounds.retained.clear();
                self.leased.clear();
            }
            _ => {}
        }
    }

    /// Widens the bounds by the pages of a put, before the put begins.
    pub(super) fn expect_put(&mut self, at: usize, pages: usize) {
        self.bounds.most[at] |= leading(pages);
        self.bounds.deleted[at] &= !leading(pages);
    }

    /// Narrows the bounds after a drop: dropped pages must not return, even after a crash.
    pub(super) fn expect_dropped(&mut self, operation: &Operation) {
        match *operation {
            Operation::DropScope { kind } => {
                self.bounds.most[kind * SEQUENCES_PER_KIND as usize..]
                    [..SEQUENCES_PER_KIND as usize]
                    .fill(0);
                self.void_unfinished_puts(|at| at / SEQUENCES_PER_KIND as usize == kind);
            }
            Operation::Clear => {
                self.bounds.most.fill(0);
                self.void_unfinished_puts(|_| true);
            }
            _ => {}
        }
    }
}

//! What each act allows a later crash to remove or to leave.

use super::Life;
use crate::common::MIB;
use crate::kinds::{KINDS, NAMES, leading, left_by_delete};
use crate::operation::Act;

impl Life {
    /// Records what an act may leave, before it begins.
    pub(super) fn expect(&mut self, act: &Act) {
        match *act {
            Act::Put { at, pages, .. } => self.expect_put(at, pages),
            Act::Resize { mib } => self.bounds.ceiling = self.bounds.ceiling.max(mib * MIB),
            Act::Configure { kind, settings: ref wanted } => {
                self.bounds.limited[kind] |= wanted.quota_bytes.is_some();
                // Less may be retained now.
                self.retained.retain(|(at, ..)| at / NAMES as usize != kind);
                self.bounds.retained.retain(|(at, _)| at / NAMES as usize != kind);
            }
            Act::Delete { at, page } => {
                let left = left_by_delete(at, page);
                if self.family.never_full {
                    self.bounds.least[at] &= left;
                    self.bounds.deleted[at] |= !left;
                }
                self.retained.retain(|retained| retained.0 != at);
                self.bounds.retained.retain(|retained| retained.0 != at);
                self.leased.retain(|leased| leased.1 != at);
            }
            Act::DropScope { .. } | Act::Clear => {
                if self.family.never_full {
                    let kinds = match *act {
                        Act::DropScope { kind } => kind..kind + 1,
                        _ => 0..KINDS,
                    };
                    let of = |kind: usize| kind * NAMES as usize;
                    self.bounds.least[of(kinds.start)..of(kinds.end)].fill(0);
                }
                self.retained.clear();
                self.bounds.retained.clear();
                self.leased.clear();
            }
            _ => {}
        }
    }

    /// Records a put before it begins.
    pub(super) fn expect_put(&mut self, at: usize, pages: usize) {
        self.bounds.most[at] |= leading(pages);
        self.bounds.deleted[at] &= !leading(pages);
    }

    /// Dropped pages are gone, now and after any crash.
    pub(super) fn forget_dropped(&mut self, act: &Act) {
        match *act {
            Act::DropScope { kind } => {
                self.bounds.most[kind * NAMES as usize..][..NAMES as usize].fill(0);
                self.void_halves(|at| at / NAMES as usize == kind);
            }
            Act::Clear => {
                self.bounds.most.fill(0);
                self.void_halves(|_| true);
            }
            _ => {}
        }
    }
}

//! A doubly linked list over slot numbers: the order of use.

/// No slot.
const NONE: u32 = u32::MAX;

/// The neighbours of a slot.
#[derive(Clone, Copy, Debug)]
struct Node {
    older: u32,
    newer: u32,
    listed: bool,
}

/// Slots in order of use. Every operation takes constant time.
///
/// Invariant: the listed nodes form one chain from `oldest` to `newest`, in both directions.
#[derive(Debug)]
pub(super) struct Order {
    nodes: Vec<Node>,
    oldest: u32,
    newest: u32,
}

impl Order {
    pub(super) fn new() -> Self {
        Self { nodes: Vec::new(), oldest: NONE, newest: NONE }
    }

    pub(super) fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    pub(super) fn is_listed(&self, slot: u32) -> bool {
        self.nodes.get(slot as usize).is_some_and(|node| node.listed)
    }

    /// Makes `slot`, which is not listed, the newest.
    pub(super) fn push_newest(&mut self, slot: u32) {
        let older = self.newest;
        self.set(slot, Node { older, newer: NONE, listed: true });
        if older == NONE {
            self.oldest = slot;
        } else {
            self.nodes[older as usize].newer = slot;
        }
        self.newest = slot;
    }

    /// Makes `slot`, which is not listed, the oldest.
    pub(super) fn push_oldest(&mut self, slot: u32) {
        let newer = self.oldest;
        self.set(slot, Node { older: NONE, newer, listed: true });
        if newer == NONE {
            self.newest = slot;
        } else {
            self.nodes[newer as usize].older = slot;
        }
        self.oldest = slot;
    }

    /// Takes `slot` out, if it is listed.
    pub(super) fn unlink(&mut self, slot: u32) {
        if !self.is_listed(slot) {
            return;
        }
        let Node { older, newer, .. } = self.nodes[slot as usize];
        if older == NONE {
            self.oldest = newer;
        } else {
            self.nodes[older as usize].newer = newer;
        }
        if newer == NONE {
            self.newest = older;
        } else {
            self.nodes[newer as usize].older = older;
        }
        self.nodes[slot as usize].listed = false;
    }

    fn set(&mut self, slot: u32, node: Node) {
        debug_assert!(!self.is_listed(slot));
        let at = slot as usize;
        if at >= self.nodes.len() {
            self.nodes.resize(at + 1, Node { older: NONE, newer: NONE, listed: false });
        }
        self.nodes[at] = node;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(order: &mut Order) -> Vec<u32> {
        let next = |order: &mut Order| order.oldest().inspect(|&slot| order.unlink(slot));
        std::iter::from_fn(|| next(order)).collect()
    }

    #[test]
    fn both_ends_and_the_middle() {
        let mut order = Order::new();
        [3, 1, 2].into_iter().for_each(|slot| order.push_newest(slot));
        order.push_oldest(0);
        order.unlink(1);
        order.unlink(1);
        order.push_newest(1);
        assert!(order.is_listed(1) && !order.is_listed(9));
        assert_eq!(drain(&mut order), [0, 3, 2, 1]);
        order.push_newest(5);
        assert_eq!(drain(&mut order), [5]);
        assert!(order.oldest().is_none());
    }
}

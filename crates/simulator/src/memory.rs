//! Where memory lies: free memory of nodes, segments in pieces, and moves and large pages with their cost.
//!
//! A segment is cut into **pieces** of the size of a large page (2 MiB, or 16 MiB on POWER). A piece lies on one node
//! and has small pages or one large page. homeostat moves and converts at this resolution, and 170 GB cost 10,000
//! pieces. Striped memory is striped by pieces.
//!
//! Costs (machine-model B.2): a move takes 3 µs a page at 5 GB/s. A conversion takes 4.1 ms per 2 MiB on unused frames.
//! On contiguous frames, after a split, it takes a seventh (measured on this project's machines, 0.3 s per GiB). A
//! split takes a tenth of a conversion.

use homeostat_model::{Bytes, NodeId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Fixed cost of moving one page, in nanoseconds (machine-model B.2, assumed).
pub const MOVE_PAGE_NS: f64 = 3_000.0;
/// Copying speed of a move in bytes per nanosecond = GB/s (machine-model B.2, assumed).
pub const MOVE_BANDWIDTH: f64 = 5.0;
/// Cost of converting a byte to large pages, ns: 4.1 ms per 2 MiB (machine-model B.2, measured).
pub const CONVERT_NS_PER_BYTE: f64 = 4.1e6 / (2.0 * 1024.0 * 1024.0);
/// Share of that cost when the frames are in one piece already.
pub const CONVERT_AGAIN_SHARE: f64 = 1.0 / 7.0;
/// Share of the cost of a conversion that a split takes.
pub const SPLIT_SHARE: f64 = 0.1;
/// Share of a node that the kernel keeps free: closed to moves and allocations.
pub const RESERVE_SHARE: f64 = 0.01;
/// Most pieces of one segment: 512 GiB in 2 MiB pieces.
const PIECES_MAX: u64 = 256 * 1024;

/// Why memory could not be had, moved or converted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// Not enough free memory there.
    #[error("{wanted} wanted{}, {free} free", node.map(|n| format!(" on node {n}")).unwrap_or_default())]
    NoMemory {
        /// The node; `None` = all nodes together.
        node: Option<NodeId>,
        /// How much was wanted.
        wanted: Bytes,
        /// How much is free beyond the reserve.
        free: Bytes,
    },
    /// Enough free memory, but none of it in one piece.
    #[error("no {wanted} in one piece on node {node} ({free} free, fragmented)")]
    Fragmented {
        /// The node.
        node: NodeId,
        /// Size of the piece.
        wanted: Bytes,
        /// Free memory there.
        free: Bytes,
    },
    /// The node is not online or does not exist.
    #[error("node {0} is offline")]
    Offline(NodeId),
    /// A segment too large for the simulation.
    #[error("a segment of {0} has more pieces than can be simulated")]
    TooLarge(Bytes),
}

/// One memory node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Its memory.
    pub total: Bytes,
    /// Free, in blocks of at least one large page.
    pub whole: Bytes,
    /// Free, in smaller blocks.
    pub loose: Bytes,
    /// Whether memory may be put there.
    pub online: bool,
}

impl Node {
    /// All free memory.
    pub fn free(&self) -> Bytes {
        self.whole + self.loose
    }
    /// Free memory beyond the kernel's reserve.
    pub fn available(&self) -> Bytes {
        self.free().saturating_sub(reserve(self.total))
    }
}

fn reserve(total: Bytes) -> Bytes {
    Bytes((total.0 as f64 * RESERVE_SHARE) as u64)
}

const LARGE: u8 = 1;
const SPARSE: u8 = 2;
const WHOLE_FRAMES: u8 = 4;

/// Memory of one process, or shared by the processes of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// First address.
    pub base: u64,
    /// Length.
    pub bytes: Bytes,
    /// Whether several processes may map it.
    pub shared: bool,
    piece: u64,
    page: u64,
    node: Vec<u8>,
    state: Vec<u8>,
    skew: f64,
    /// Access share of each piece, where computing it takes a power. Immutable, so copies share it.
    weights: Arc<[f64]>,
    pages_on: Vec<u64>,
    weight_on: Vec<f64>,
    large_pieces: u64,
    large_weight: f64,
}

impl Segment {
    /// Number of pieces, the last of which may be short.
    pub fn pieces(&self) -> usize {
        self.node.len()
    }
    /// Small pages in a piece.
    pub fn pages_in(&self, piece: usize) -> u64 {
        let length = (self.bytes.0 - (piece as u64 * self.piece).min(self.bytes.0)).min(self.piece);
        let pages = length.div_ceil(self.page);
        if self.is(piece, SPARSE) {
            (pages / 2).max(1)
        } else {
            pages
        }
    }
    /// Resident bytes of a piece.
    pub fn bytes_in(&self, piece: usize) -> Bytes {
        Bytes(self.pages_in(piece) * self.page)
    }
    /// Share of the accesses to this segment that go to this piece; sum 1. The first pieces are the hottest.
    pub fn weight(&self, piece: usize) -> f64 {
        match self.weights.get(piece) {
            Some(weight) => *weight,
            None => weight(piece, self.pieces(), self.skew),
        }
    }
    /// Node of a piece.
    pub fn node_of(&self, piece: usize) -> usize {
        self.node.get(piece).map_or(0, |n| usize::from(*n))
    }
    /// Whether a large page maps the piece.
    pub fn is_large(&self, piece: usize) -> bool {
        self.is(piece, LARGE)
    }
    /// Whether pages of the piece are missing, so that a large page would add memory.
    pub fn is_sparse(&self, piece: usize) -> bool {
        self.is(piece, SPARSE) || (piece as u64 + 1) * self.piece > self.bytes.0
    }
    /// The piece that starts at this address.
    pub fn piece_at(&self, address: u64) -> Option<usize> {
        let offset = address.checked_sub(self.base)?;
        let index = (offset / self.piece) as usize;
        (offset % self.piece == 0 && index < self.pieces()).then_some(index)
    }
    /// Address of a piece.
    pub fn address_of(&self, piece: usize) -> u64 {
        self.base + piece as u64 * self.piece
    }
    /// Small pages (or their equivalent in large ones) by node.
    pub fn pages_on(&self) -> &[u64] {
        &self.pages_on
    }
    /// Share of the accesses by node; all together 1.
    pub fn weight_on(&self) -> &[f64] {
        &self.weight_on
    }
    /// Resident memory.
    pub fn resident(&self) -> Bytes {
        Bytes(self.pages_on.iter().sum::<u64>() * self.page)
    }
    /// Number of pieces on large pages.
    pub fn large_pieces(&self) -> u64 {
        self.large_pieces
    }
    /// Share of the accesses that go to large pages, 0..1.
    pub fn large_weight(&self) -> f64 {
        self.large_weight.clamp(0.0, 1.0)
    }
    /// A number that changes with any piece's place or kind, to compare pictures of the machine.
    pub fn digest(&self) -> u64 {
        let visible = self.state.iter().map(|s| s & LARGE);
        self.node
            .iter()
            .zip(visible)
            .fold(0xCBF2_9CE4_8422_2325, |h: u64, (n, s)| {
                (h ^ (u64::from(*n) << 1 | u64::from(s))).wrapping_mul(0x100_0000_01B3)
            })
    }

    fn is(&self, piece: usize, flag: u8) -> bool {
        self.state.get(piece).is_some_and(|s| s & flag != 0)
    }
    fn set(&mut self, piece: usize, flag: u8, on: bool) {
        if let Some(s) = self.state.get_mut(piece) {
            *s = if on { *s | flag } else { *s & !flag };
        }
    }
    fn account(&mut self, node: usize, pages: u64, weight: f64, arrives: bool) {
        if let Some(p) = self.pages_on.get_mut(node) {
            *p = if arrives {
                *p + pages
            } else {
                p.saturating_sub(pages)
            };
        }
        if let Some(w) = self.weight_on.get_mut(node) {
            *w = if arrives {
                *w + weight
            } else {
                (*w - weight).max(0.0)
            };
        }
    }
    fn place(&mut self, piece: usize, node: usize) {
        let (pages, weight, from) = (self.pages_in(piece), self.weight(piece), self.node_of(piece));
        self.account(from, pages, weight, false);
        self.account(node, pages, weight, true);
        if let Some(n) = self.node.get_mut(piece) {
            *n = node as u8;
        }
    }
}

fn weight(piece: usize, pieces: usize, skew: f64) -> f64 {
    let n = pieces.max(1) as f64;
    let below = |i: f64| {
        let share = (1.0 - i / n).max(0.0);
        // Skip the power of one: most memory is used evenly, and every piece needs this.
        if skew == 1.0 { share } else { share.powf(skew) }
    };
    below(piece as f64) - below(piece as f64 + 1.0)
}

/// How a segment is laid out when it is made.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Share of the memory by node; what does not fit goes where there is room.
    pub shares: Vec<f64>,
    /// Unevenness of accesses: 1 = every page alike, 3 = the first third gets 70 % (machine-model B.1 point 9).
    pub skew: f64,
    /// Share of the pieces that have holes, 0..1.
    pub sparse: f64,
    /// Share of the pieces that are on large pages from the start, 0..1.
    pub large: f64,
}

/// The memory of the machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    page: u64,
    piece: u64,
    nodes: Vec<Node>,
    fragmentation: f64,
}

impl Memory {
    /// Free memory on nodes of these sizes. `fragmentation`: share of the free memory outside large blocks, 0..1.
    pub fn new(sizes: &[Bytes], page: Bytes, piece: Bytes, fragmentation: f64) -> Self {
        let fragmentation = fragmentation.clamp(0.0, 1.0);
        let page = page.0.max(1);
        let nodes = sizes
            .iter()
            .map(|total| {
                let loose = Bytes((total.0 as f64 * fragmentation) as u64);
                Node {
                    total: *total,
                    whole: total.saturating_sub(loose),
                    loose,
                    online: true,
                }
            })
            .collect();
        Self {
            page,
            piece: piece.0.max(page),
            nodes,
            fragmentation,
        }
    }

    /// Base page size.
    pub fn page(&self) -> Bytes {
        Bytes(self.page)
    }
    /// Large page size.
    pub fn piece(&self) -> Bytes {
        Bytes(self.piece)
    }
    /// The nodes.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }
    /// One node.
    pub fn node(&self, node: usize) -> Option<&Node> {
        self.nodes.get(node)
    }
    /// Switches a node off or on. Memory that is there stays until it is moved.
    pub fn set_online(&mut self, node: usize, online: bool) -> bool {
        match self.nodes.get_mut(node) {
            Some(n) => {
                n.online = online;
                true
            }
            None => false,
        }
    }
    #[cfg(test)]
    fn free(&self) -> Bytes {
        self.nodes.iter().map(Node::free).sum()
    }

    fn take(&mut self, node: usize, bytes: u64) -> Result<(), MemoryError> {
        let id = NodeId(node as u32);
        let n = self
            .nodes
            .get_mut(node)
            .filter(|n| n.online)
            .ok_or(MemoryError::Offline(id))?;
        if n.available().0 < bytes {
            return Err(MemoryError::NoMemory {
                node: Some(id),
                wanted: Bytes(bytes),
                free: n.available(),
            });
        }
        let loose = n.loose.0.min(bytes);
        n.loose = Bytes(n.loose.0 - loose);
        n.whole = n.whole.saturating_sub(Bytes(bytes - loose));
        Ok(())
    }
    fn give(&mut self, node: usize, bytes: u64, in_one_piece: bool) {
        let share = if in_one_piece { 0.0 } else { self.fragmentation };
        if let Some(n) = self.nodes.get_mut(node) {
            let loose = (bytes as f64 * share) as u64;
            n.loose += Bytes(loose);
            n.whole += Bytes(bytes - loose);
        }
    }

    /// Allocates a segment.
    ///
    /// # Errors
    /// [`MemoryError::NoMemory`] when it fits nowhere; nothing is taken then.
    pub fn allocate(
        &mut self,
        base: u64,
        bytes: Bytes,
        shared: bool,
        shape: &Shape,
    ) -> Result<Segment, MemoryError> {
        let count = bytes.0.div_ceil(self.piece);
        if count > PIECES_MAX {
            return Err(MemoryError::TooLarge(bytes));
        }
        let skew = shape.skew.clamp(1.0, 10.0);
        let mut segment = Segment {
            base,
            bytes,
            shared,
            piece: self.piece,
            page: self.page,
            node: vec![0; count as usize],
            state: vec![0; count as usize],
            skew,
            weights: if skew == 1.0 {
                Arc::default()
            } else {
                (0..count as usize)
                    .map(|piece| weight(piece, count as usize, skew))
                    .collect()
            },
            pages_on: vec![0; self.nodes.len()],
            weight_on: vec![0.0; self.nodes.len()],
            large_pieces: 0,
            large_weight: 0.0,
        };
        let whole: f64 = shape.shares.iter().filter(|s| **s > 0.0).sum();
        let share = |n: usize| match shape.shares.get(n) {
            Some(s) if whole > 0.0 => s.max(0.0) / whole,
            _ if whole > 0.0 => 0.0,
            _ => 1.0 / self.nodes.len().max(1) as f64,
        };
        let shares: Vec<f64> = (0..self.nodes.len()).map(share).collect();
        let mut given = vec![0.0; self.nodes.len()];
        let before = self.nodes.clone();
        let mut sparse_due = 0.0;
        for piece in 0..segment.pieces() {
            sparse_due += shape.sparse.clamp(0.0, 1.0);
            if sparse_due >= 1.0 {
                sparse_due -= 1.0;
                segment.set(piece, SPARSE, true);
            }
            let wanted = segment.bytes_in(piece).0;
            // The node furthest behind its share; nodes without a share come last.
            let behind = |n: usize| {
                shares.get(n).copied().unwrap_or(0.0) * (piece as f64 + 1.0)
                    - given.get(n).copied().unwrap_or(0.0)
            };
            let mut order: Vec<usize> = (0..self.nodes.len()).collect();
            order.sort_by(|a, b| behind(*b).total_cmp(&behind(*a)).then(a.cmp(b)));
            let Some(node) = order.into_iter().find(|n| self.take(*n, wanted).is_ok()) else {
                let free = before.iter().map(Node::available).sum();
                self.nodes = before;
                return Err(MemoryError::NoMemory {
                    node: None,
                    wanted: bytes,
                    free,
                });
            };
            if let Some(g) = given.get_mut(node) {
                *g += 1.0;
            }
            let (pages, weight) = (segment.pages_in(piece), segment.weight(piece));
            segment.account(node, pages, weight, true);
            if let Some(n) = segment.node.get_mut(piece) {
                *n = node as u8;
            }
        }
        let large = (segment.pieces() as f64 * shape.large.clamp(0.0, 1.0)).round() as usize;
        for piece in 0..large.min(segment.pieces()) {
            if !segment.is_sparse(piece) {
                segment.set(piece, LARGE | WHOLE_FRAMES, true);
                segment.large_pieces += 1;
                segment.large_weight += segment.weight(piece);
            }
        }
        Ok(segment)
    }

    /// Gives the memory of a segment back.
    pub fn release(&mut self, segment: &Segment) {
        for piece in 0..segment.pieces() {
            let whole = segment.is(piece, WHOLE_FRAMES);
            self.give(segment.node_of(piece), segment.bytes_in(piece).0, whole);
        }
    }

    /// Moves a piece to a node. Returns the mover's work in ns; zero if it is already there.
    ///
    /// # Errors
    /// No free memory there, or the node is offline; the piece stays.
    pub fn move_piece(&mut self, segment: &mut Segment, piece: usize, to: usize) -> Result<f64, MemoryError> {
        let from = segment.node_of(piece);
        if from == to || piece >= segment.pieces() {
            return Ok(0.0);
        }
        let bytes = segment.bytes_in(piece).0;
        self.take(to, bytes)?;
        self.give(from, bytes, segment.is(piece, WHOLE_FRAMES));
        let cost = move_cost(segment.pages_in(piece), bytes);
        segment.place(piece, to);
        segment.set(piece, WHOLE_FRAMES, false);
        Ok(cost)
    }

    /// Whether the piece could be moved there now, without moving it.
    pub fn has_room(&self, node: usize, bytes: Bytes, keep_free: Bytes) -> bool {
        self.nodes
            .get(node)
            .is_some_and(|n| n.online && n.available().0 >= bytes.0 && n.free().0 >= bytes.0 + keep_free.0)
    }

    /// Puts a full piece on a large page. Returns the time in ns; zero if it is already on one.
    ///
    /// # Errors
    /// No free block of that size on the node of the piece.
    pub fn convert(&mut self, segment: &mut Segment, piece: usize) -> Result<f64, MemoryError> {
        if segment.is_large(piece) || segment.is_sparse(piece) {
            return Ok(0.0);
        }
        let at = segment.node_of(piece);
        let id = NodeId(at as u32);
        let again = segment.is(piece, WHOLE_FRAMES);
        let size = self.piece;
        let fragmentation = self.fragmentation;
        let node = self.nodes.get_mut(at).ok_or(MemoryError::Offline(id))?;
        if node.whole.0 < size + reserve(node.total).0.min(node.whole.0 / 64) {
            return Err(MemoryError::Fragmented {
                node: id,
                wanted: Bytes(size),
                free: node.free(),
            });
        }
        if !again {
            // A large block is used, and scattered small frames come back.
            let loose = Bytes((size as f64 * fragmentation) as u64);
            node.whole = node.whole.saturating_sub(loose);
            node.loose += loose;
        }
        segment.set(piece, LARGE | WHOLE_FRAMES, true);
        segment.large_pieces += 1;
        segment.large_weight += segment.weight(piece);
        let cost = size as f64 * CONVERT_NS_PER_BYTE;
        Ok(if again { cost * CONVERT_AGAIN_SHARE } else { cost })
    }

    /// Splits a piece's large page; its frames stay in place. Returns the time in ns.
    pub fn split(&mut self, segment: &mut Segment, piece: usize) -> f64 {
        if !segment.is_large(piece) {
            return 0.0;
        }
        segment.set(piece, LARGE, false);
        segment.large_pieces = segment.large_pieces.saturating_sub(1);
        segment.large_weight -= segment.weight(piece);
        if segment.large_pieces == 0 {
            segment.large_weight = 0.0;
        }
        self.piece as f64 * CONVERT_NS_PER_BYTE * SPLIT_SHARE
    }
}

/// Time to move this many pages and bytes, in nanoseconds.
pub fn move_cost(pages: u64, bytes: u64) -> f64 {
    pages as f64 * MOVE_PAGE_NS + bytes as f64 / MOVE_BANDWIDTH
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn shape(shares: &[f64]) -> Shape {
        Shape {
            shares: shares.to_vec(),
            skew: 1.0,
            sparse: 0.0,
            large: 0.0,
        }
    }
    fn memory(fragmentation: f64) -> Memory {
        Memory::new(
            &[Bytes(1024 * MIB), Bytes(1024 * MIB)],
            Bytes(4096),
            Bytes(2 * MIB),
            fragmentation,
        )
    }

    #[test]
    fn the_weights_of_uneven_memory_are_remembered_as_they_are() {
        let mut m = memory(0.0);
        let uneven = Shape {
            skew: 2.5,
            ..shape(&[1.0])
        };
        let s = m.allocate(0, Bytes(401 * MIB), false, &uneven).unwrap();
        let all: Vec<f64> = (0..s.pieces()).map(|p| s.weight(p)).collect();
        let worked_out: Vec<f64> = (0..s.pieces()).map(|p| weight(p, s.pieces(), 2.5)).collect();
        assert_eq!(all, worked_out);
        assert!((all.iter().sum::<f64>() - 1.0).abs() < 1e-12 && all[0] > 2.0 * all[100]);
    }

    #[test]
    fn memory_is_laid_out_by_shares_and_moved_back_exactly() {
        let mut m = memory(0.2);
        let mut s = m
            .allocate(0, Bytes(400 * MIB), false, &shape(&[0.6, 0.4]))
            .unwrap();
        assert_eq!(s.pages_on(), [120 * 512, 80 * 512]);
        assert!((s.weight_on()[0] - 0.6).abs() < 1e-9);
        let found: Vec<usize> = (0..s.pieces()).map(|p| s.node_of(p)).collect();
        let (before, digest) = (m.free(), s.digest());
        let mut cost = 0.0;
        for p in 0..s.pieces() {
            cost += m.move_piece(&mut s, p, 1).unwrap();
        }
        assert_eq!(s.pages_on(), [0, 200 * 512]);
        assert_eq!(m.free(), before);
        // 240 MiB: 61,440 pages of 3 µs and 50 ms of copying.
        assert!((cost / 1e9 - (0.184_32 + 0.050_33)).abs() < 1e-4, "{cost}");
        for (p, n) in found.iter().enumerate() {
            m.move_piece(&mut s, p, *n).unwrap();
        }
        assert_eq!((s.pages_on(), s.digest()), (&[120 * 512, 80 * 512][..], digest));
        m.release(&s);
        assert_eq!(m.free(), Bytes(2048 * MIB));
    }

    #[test]
    fn what_does_not_fit_goes_elsewhere_or_is_refused_whole() {
        let mut m = memory(0.0);
        let s = m
            .allocate(0, Bytes(1500 * MIB), false, &shape(&[1.0, 0.0]))
            .unwrap();
        assert!(s.pages_on()[1] > 0 && s.resident() == Bytes(1500 * MIB));
        let before = m.clone();
        let refused = m.allocate(0, Bytes(600 * MIB), false, &shape(&[1.0, 0.0]));
        assert!(
            matches!(refused, Err(MemoryError::NoMemory { node: None, .. })),
            "{refused:?}"
        );
        assert_eq!(m, before);
    }

    #[test]
    fn conversion_needs_blocks_and_a_second_one_is_cheaper() {
        let mut m = memory(0.0);
        let mut s = m.allocate(0, Bytes(100 * MIB), false, &shape(&[1.0])).unwrap();
        let first = m.convert(&mut s, 3).unwrap();
        assert!((first - 4.1e6).abs() < 1.0);
        assert!((s.large_weight() - 1.0 / 50.0).abs() < 1e-9);
        assert_eq!(m.split(&mut s, 3), first * SPLIT_SHARE);
        assert!(m.convert(&mut s, 3).unwrap() < first / 6.0);
        assert_eq!(m.convert(&mut s, 3).unwrap(), 0.0, "is large already");
        let mut fragmented = memory(1.0);
        let mut s = fragmented
            .allocate(0, Bytes(100 * MIB), false, &shape(&[1.0]))
            .unwrap();
        assert!(matches!(
            fragmented.convert(&mut s, 3),
            Err(MemoryError::Fragmented { .. })
        ));
    }

    #[test]
    fn holes_are_not_filled_and_the_last_piece_is_short() {
        let mut m = memory(0.0);
        let sparse = Shape {
            sparse: 0.25,
            ..shape(&[1.0])
        };
        let mut s = m.allocate(0, Bytes(17 * MIB), false, &sparse).unwrap();
        let holes = (0..s.pieces()).filter(|p| s.is_sparse(*p)).count();
        assert_eq!((s.pieces(), holes), (9, 3), "two with holes and the short one");
        assert_eq!(s.resident(), Bytes(15 * MIB));
        for p in 0..s.pieces() {
            m.convert(&mut s, p).unwrap();
        }
        assert_eq!(s.large_pieces(), 6);
    }

    #[test]
    fn skewed_accesses_come_first() {
        let mut m = memory(0.0);
        let s = m
            .allocate(
                0,
                Bytes(200 * MIB),
                false,
                &Shape {
                    skew: 3.0,
                    ..shape(&[1.0])
                },
            )
            .unwrap();
        let first: f64 = (0..30).map(|p| s.weight(p)).sum();
        assert!((first - (1.0 - 0.7f64.powi(3))).abs() < 1e-9, "{first}");
    }

    proptest! {
        #[test]
        fn nothing_is_lost_whatever_is_done(ops in prop::collection::vec((0usize..60, 0usize..2, 0u8..3), 0..200), fragmentation in 0.0..1.0f64, sparse in 0.0..0.5f64) {
            let mut m = memory(fragmentation);
            let mut s = m.allocate(0, Bytes(111 * MIB), true, &Shape { sparse, ..shape(&[0.5, 0.5]) }).unwrap();
            let (free, resident) = (m.free(), s.resident());
            for (piece, node, op) in ops {
                let _ = match op {
                    0 => m.move_piece(&mut s, piece, node),
                    1 => m.convert(&mut s, piece),
                    _ => Ok(m.split(&mut s, piece)),
                };
                prop_assert_eq!(m.free(), free);
                prop_assert_eq!(s.resident(), resident);
                prop_assert!((s.weight_on().iter().sum::<f64>() - 1.0).abs() < 1e-9);
                let large = (0..s.pieces()).filter(|p| s.is_large(*p)).count() as u64;
                prop_assert_eq!(s.large_pieces(), large);
                prop_assert!(m.nodes().iter().all(|n| n.free().0 <= n.total.0));
            }
        }
    }
}

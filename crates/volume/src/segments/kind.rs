//! File systems, by the magic number that `statfs(2)` returns.

/// The guarantees of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trust {
    /// Local and durable. Direct I/O is used if it works in the self-test of the directory.
    Local,
    /// In memory: contents are lost at the next boot, and direct I/O gains nothing.
    Memory,
    /// Local, but I/O may go through the page cache although an open with `O_DIRECT` succeeds.
    PageCache,
    /// Remote: locks, durability and cache coherence depend on another machine or process.
    Foreign,
    /// A file system that [`of`] does not list.
    Unknown,
}

/// Name and guarantees of the file system with this magic number. Zero is the simulated file
/// system of tests.
pub(super) fn of(magic: u64) -> (&'static str, Trust) {
    use Trust::{Foreign, Local, Memory, PageCache, Unknown};
    match magic {
        0 => ("simulated", Local),
        0xef53 => ("ext4", Local),
        0x5846_5342 => ("xfs", Local),
        0x9123_683e => ("btrfs", Local),
        0xf2f5_2010 => ("f2fs", Local),
        0x2fc1_2fc1 => ("zfs", Local),
        0xca45_1a4e => ("bcachefs", Local),
        0x3153_464a => ("jfs", Local),
        0x3434 => ("nilfs2", Local),
        ritornello_medium::TMPFS => ("tmpfs", Memory),
        0x8584_58f6 => ("ramfs", PageCache),
        0x794c_7630 => ("overlayfs", PageCache),
        0xf15f => ("ecryptfs", PageCache),
        0x6969 => ("nfs", Foreign),
        0x517b => ("smb", Foreign),
        0xff53_4d42 => ("cifs", Foreign),
        0xfe53_4d42 => ("smb2", Foreign),
        0x6573_5546 => ("fuse", Foreign),
        0x0102_1997 => ("9p", Foreign),
        0x00c3_6400 => ("ceph", Foreign),
        0x0bd0_0bd0 => ("lustre", Foreign),
        0x4750_4653 => ("gpfs", Foreign),
        0x5346_414f | 0x6b41_4653 => ("afs", Foreign),
        0x0116_1970 => ("gfs2", Foreign),
        0x7461_636f => ("ocfs2", Foreign),
        0x786f_4256 => ("vboxsf", Foreign),
        0xbacb_acbc => ("vmhgfs", Foreign),
        _ => ("unknown", Unknown),
    }
}

/// Whether `fallocate` on a file of this file system waits for all direct writes to the file that
/// are in flight, including writes of a killed process. `tests/python/test_real_devices.py`
/// tests this for ext4 and XFS. `io_uring` may make direct writes only on such file systems,
/// because its requests outlive the process that submitted them. Writes by threads do not outlive
/// their process: a thread exits only after its `pwrite` returns.
pub(super) fn drains(magic: u64) -> bool {
    const EXT4: u64 = 0xef53;
    const XFS: u64 = 0x5846_5342;
    matches!(magic, EXT4 | XFS)
}

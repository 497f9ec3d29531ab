//! Counts the runs and pages of an index that is not open, without a change of its files.

use super::frames::read_twice;
use super::recovery::{READ, read_checkpoint_header};
use super::{RunIndex, checkpoint, journal};
use ritornello_format::Result;
use ritornello_format::checkpoint::{CheckpointEnd, CheckpointFrame, CheckpointHeader};
use ritornello_format::journal::{JournalHeader, Parsed, read_frame};
use ritornello_medium::{Medium, is_unreadable};
use std::cell::Cell;
use std::path::Path;

/// The files of an index that is not open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredIndex {
    /// Numbers of runs and of pages in the newest checkpoint whose header and last frame are
    /// intact; `None` without such a checkpoint. The other frames are not read, and may be damaged.
    pub checkpoint: Option<(u64, u64)>,
    /// Bytes of the records in the journal files that recovery replays after it has loaded the
    /// counted checkpoint; in all journal files if `checkpoint` is `None`.
    pub journal_bytes: u64,
    /// Whether `checkpoint` is `None` although the journal does not begin with the first change:
    /// the next owner cannot recover all pages.
    pub lacks_checkpoint: bool,
}

impl RunIndex {
    /// Reads the header and the last frame of each checkpoint in `dir`, and the lengths of the
    /// journal files. Changes nothing. An owner may change the files during the call: the result
    /// may then count a checkpoint that is no longer the newest, or the call may fail.
    ///
    /// # Errors
    /// `Invalid` if a checkpoint has an unknown format version; file-system errors.
    pub fn stored(medium: &dyn Medium, dir: &Path) -> Result<StoredIndex> {
        let mut newest: Option<(CheckpointHeader, CheckpointEnd)> = None;
        for slot in 0..2 {
            let header = read_checkpoint_header(medium, dir, slot, &Cell::new(false))?;
            let Some(header) = header else { continue };
            let Some(end) = read_end(medium, &checkpoint::path(dir, slot), header)? else {
                continue;
            };
            if newest.is_none_or(|(other, _)| other.id < header.id) {
                newest = Some((header, end));
            }
        }
        let first = newest.map_or(0, |(header, _)| header.journal);
        let numbers = journal::numbers(medium, dir)?;
        let mut journal_bytes = 0;
        for number in numbers.iter().copied().filter(|number| *number >= first) {
            let length = medium.open(&journal::path(dir, number), READ)?.length()?;
            journal_bytes += length.saturating_sub(JournalHeader::BYTES as u64);
        }
        let has_checkpoint_file =
            || (0..2).any(|slot| medium.open(&checkpoint::path(dir, slot), READ).is_ok());
        // Journal files are numbered from 1, and are removed only when a checkpoint replaces them.
        let lacks_changes = match numbers.first() {
            Some(number) => *number > 1,
            None => has_checkpoint_file(),
        };
        Ok(StoredIndex {
            checkpoint: newest.map(|(_, end)| (end.runs, end.pages)),
            journal_bytes,
            lacks_checkpoint: newest.is_none() && lacks_changes,
        })
    }
}

/// Reads the last frame of the checkpoint in the file `path`; `None` if the file does not end with
/// the last frame of the checkpoint that `header` begins.
fn read_end(
    medium: &dyn Medium,
    path: &Path,
    header: CheckpointHeader,
) -> Result<Option<CheckpointEnd>> {
    let file = medium.open(path, READ)?;
    let Some(offset) = file.length()?.checked_sub(CheckpointFrame::END_BYTES as u64) else {
        return Ok(None);
    };
    let mut bytes = [0; CheckpointFrame::END_BYTES];
    let read = match read_twice(file.as_ref(), &mut bytes, offset) {
        Err(error) if is_unreadable(&error) => return Ok(None),
        read => read?,
    };
    let Parsed::Frame(frame) = read_frame(&bytes[..read]) else { return Ok(None) };
    // Only the high half of the sequence number is known without the frames before this frame.
    if frame.sequence >> 32 != header.sequence(0) >> 32 {
        return Ok(None);
    }
    match CheckpointFrame::decode(frame.kind, frame.body) {
        Ok(CheckpointFrame::End(end)) => Ok(Some(end)),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_format::wire::Writer;
    use ritornello_medium::Host;
    use std::path::PathBuf;

    fn write_checkpoint(dir: &Path, slot: usize, id: u64, journal: u64, pages: u64) -> PathBuf {
        let header = CheckpointHeader { id, journal, first: 1 };
        let mut file = Writer::new();
        file.raw(&header.encode());
        let end = CheckpointEnd { last: 1, reuse: 0, runs: 1, pages };
        CheckpointFrame::encode_end(header.sequence(0), &end, &mut file);
        let path = checkpoint::path(dir, slot);
        std::fs::write(&path, file.as_slice()).unwrap();
        path
    }

    fn write_journal(dir: &Path, number: u64, records: usize) {
        let mut bytes = JournalHeader { number, first: 1 }.encode();
        bytes.resize(JournalHeader::BYTES + records, 0);
        std::fs::write(journal::path(dir, number), bytes).unwrap();
    }

    #[test]
    fn newest_checkpoint_with_intact_end_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let stored = || RunIndex::stored(&Host, dir).unwrap();
        assert_eq!(stored(), StoredIndex::default());
        write_journal(dir, 1, 100);
        write_journal(dir, 2, 20);
        let index = StoredIndex { journal_bytes: 120, ..StoredIndex::default() };
        assert_eq!(stored(), index);
        write_checkpoint(dir, 1, 7, 1, 5);
        assert_eq!(stored(), StoredIndex { checkpoint: Some((1, 5)), ..index });
        let newer = write_checkpoint(dir, 0, 8, 2, 6);
        assert_eq!(stored(), StoredIndex { checkpoint: Some((1, 6)), journal_bytes: 20, ..index });

        // An owner has begun to replace checkpoint 8 by checkpoint 9: the head of the file is of
        // checkpoint 9, and its end of checkpoint 8.
        let mut bytes = std::fs::read(&newer).unwrap();
        let header = CheckpointHeader { id: 9, journal: 2, first: 1 }.encode();
        bytes[..header.len()].copy_from_slice(&header);
        std::fs::write(&newer, &bytes).unwrap();
        assert_eq!(stored().checkpoint, Some((1, 5)));
        std::fs::write(&newer, &bytes[..CheckpointHeader::BYTES]).unwrap();
        assert_eq!(stored().checkpoint, Some((1, 5)));
    }

    #[test]
    fn damage_of_all_checkpoints_is_distinguished_from_a_new_index() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let stored = || RunIndex::stored(&Host, dir).unwrap();
        let lacks_checkpoint = StoredIndex { lacks_checkpoint: true, ..StoredIndex::default() };
        std::fs::write(write_checkpoint(dir, 0, 8, 2, 6), b"damaged").unwrap();
        assert_eq!(stored(), lacks_checkpoint);
        // The journal has all changes since the index was created.
        write_journal(dir, 1, 20);
        write_journal(dir, 2, 10);
        assert_eq!(stored(), StoredIndex { journal_bytes: 30, ..StoredIndex::default() });
        std::fs::remove_file(journal::path(dir, 1)).unwrap();
        assert_eq!(stored(), StoredIndex { journal_bytes: 10, ..lacks_checkpoint });
    }
}

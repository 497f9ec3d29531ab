//! The checkpoints of the index `run`: images of all runs, which make earlier journal files
//! unnecessary.
//!
//! **File.** A [`CheckpointHeader`] (48 bytes), then frames as in [`crate::journal`]. A frame's
//! sequence number has the checkpoint's id in the high 32 bits and the frame's ordinal in the low
//! 32, so that a frame of an older checkpoint in the same file is not mistaken for a frame of this
//! checkpoint. Frames of kind 1 hold runs. Frames of kind 3 hold the retentions of runs in earlier
//! frames, and the store's clock ([`Retentions`]). The last frame is of kind 2 ([`CheckpointEnd`]).
//! A checkpoint is valid only if all its frames are intact, and the counts in the last frame equal
//! the numbers of its runs and pages.
//!
//! **Fuzzy.** Runs are copied while the index changes, so a copy may already show the effect of
//! journal records up to [`CheckpointEnd::last`]. The state is exact after the journal has been
//! replayed from record [`CheckpointHeader::first`] at least up to record `last`.

use crate::journal::{
    FRAME_OVERHEAD, Retentions, RunImage, read_header, write_frame, write_header,
};
use crate::wire::{Reader, Writer};
use crate::{Error, Result};

/// The header of a checkpoint: magic `RTRNCKPT` (8), version `u32`, features `u32`, id `u64`,
/// journal `u64`, first `u64`, CRC-64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointHeader {
    /// The checkpoint's number, counted from one. The low 32 bits of the number are part of every
    /// frame's sequence number.
    pub id: u64,
    /// Number of the first journal file to replay.
    pub journal: u64,
    /// Sequence number of the first record of the journal file `journal`.
    pub first: u64,
}

impl CheckpointHeader {
    const MAGIC: &'static [u8; 8] = b"RTRNCKPT";
    /// Encoded length in bytes.
    pub const BYTES: usize = 48;

    /// Encodes the header.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        write_header(Self::MAGIC, [self.id, self.journal, self.first])
    }

    /// Decodes what [`CheckpointHeader::encode`] wrote.
    ///
    /// # Errors
    /// `Miss` if the header is damaged or has another magic number; `Invalid` if it is intact, and
    /// of another version or with unknown features.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let [id, journal, first] = read_header(Self::MAGIC, "checkpoint", bytes)?;
        Ok(Self { id, journal, first })
    }

    /// Sequence number of the checkpoint's frame `ordinal`, counted from zero.
    #[must_use]
    pub const fn sequence(&self, ordinal: u32) -> u64 {
        self.id << 32 | ordinal as u64
    }
}

/// The last frame of a checkpoint. Body: last `u64`, reuse `u32`, runs `u64`, pages `u64`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckpointEnd {
    /// Sequence number of the last journal record whose effect the copied runs may show. This
    /// record is durable before this frame is written.
    pub last: u64,
    /// The largest reuse count of a run's record that the index has assigned so far (see
    /// [`RunImage::run`]).
    pub reuse: u32,
    /// Number of runs in the checkpoint.
    pub runs: u64,
    /// Number of pages in the checkpoint, without pages that were removed alone.
    pub pages: u64,
}

/// The body of a checkpoint's frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckpointFrame<'a> {
    /// Kind 1: runs. Body: [`RunImage`]s, without separators. See [`Runs`].
    Runs(Runs<'a>),
    /// Kind 2: the end of the checkpoint.
    End(CheckpointEnd),
    /// Kind 3: retentions. Body: [`Retentions`].
    Retained(Retentions),
}

/// The runs of one frame of kind 1. The iterator decodes them one by one.
#[derive(Clone, Copy, Debug)]
pub struct Runs<'a>(Reader<'a>);

impl PartialEq for Runs<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.0.rest() == other.0.rest()
    }
}
impl Eq for Runs<'_> {}

impl Iterator for Runs<'_> {
    type Item = Result<RunImage<'static>>;

    /// Returns no further run after an error.
    fn next(&mut self) -> Option<Self::Item> {
        if self.0.remaining() == 0 {
            return None;
        }
        let image = RunImage::decode(&mut self.0);
        if image.is_err() {
            self.0 = Reader::new(&[]);
        }
        Some(image)
    }
}

impl<'a> CheckpointFrame<'a> {
    /// Length in bytes of the frame that ends a checkpoint.
    pub const END_BYTES: usize = FRAME_OVERHEAD + 28;

    /// Appends a frame of kind 1, whose body is `images`: encoded [`RunImage`]s.
    pub fn encode_runs(sequence: u64, images: &[u8], writer: &mut Writer) {
        write_frame(writer, sequence, 1, images.len(), |body| {
            body.raw(images);
        });
    }

    /// Appends a frame of kind 3, which holds `retained`.
    pub fn encode_retained(sequence: u64, retained: &Retentions, writer: &mut Writer) {
        let bytes = Retentions::bytes(retained.runs.len());
        write_frame(writer, sequence, 3, bytes, |body| retained.encode(body));
    }

    /// Appends the last frame of a checkpoint, of kind 2.
    pub fn encode_end(sequence: u64, end: &CheckpointEnd, writer: &mut Writer) {
        write_frame(writer, sequence, 2, 28, |body| {
            body.u64(end.last).u32(end.reuse).u64(end.runs).u64(end.pages);
        });
    }

    /// Decodes the body of a frame.
    ///
    /// # Errors
    /// `Miss` if the kind is unknown, or if an end or retentions are malformed. Does not decode
    /// runs: the iterator [`Runs`] returns an error at a malformed run.
    pub fn decode(kind: u8, body: &'a [u8]) -> Result<Self> {
        let mut reader = Reader::new(body);
        match kind {
            1 => Ok(Self::Runs(Runs(reader))),
            2 => {
                let end = CheckpointEnd {
                    last: reader.u64()?,
                    reuse: reader.u32()?,
                    runs: reader.u64()?,
                    pages: reader.u64()?,
                };
                if reader.remaining() > 0 {
                    return Err(Error::miss(
                        "the last frame of a checkpoint is longer than its fields",
                    ));
                }
                Ok(Self::End(end))
            }
            3 => {
                let retained = Retentions::decode(&mut reader)?;
                if reader.remaining() > 0 {
                    return Err(Error::miss(
                        "the retentions of a checkpoint are longer than their fields",
                    ));
                }
                Ok(Self::Retained(retained))
            }
            _ => Err(Error::miss("a checkpoint's frame is of an unknown kind")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{Parsed, read_frame};
    use crate::{PageHash, Place, ScopeSlot};
    use std::borrow::Cow;

    #[test]
    fn checkpoint_round_trips_frame_by_frame() {
        let header = CheckpointHeader { id: 5, journal: 2, first: 30 };
        assert_eq!(CheckpointHeader::decode(&header.encode()).unwrap(), header);
        assert_eq!(header.encode().len(), CheckpointHeader::BYTES);
        let image = |run| RunImage {
            run,
            scope: ScopeSlot(1),
            chained: false,
            parent: None,
            recency: 3,
            place: Cow::Owned(Place::default()),
            pages: Cow::Owned(vec![PageHash([run as u8; 16])]),
        };
        let mut images = Writer::new();
        image(1).encode(&mut images);
        image(2).encode(&mut images);
        let end = CheckpointEnd { last: 40, reuse: 3, runs: 2, pages: 2 };
        let mut file = Writer::new();
        CheckpointFrame::encode_runs(header.sequence(0), images.as_slice(), &mut file);
        let retained = Retentions { clock: 9, runs: vec![(2, 50)] };
        CheckpointFrame::encode_retained(header.sequence(1), &retained, &mut file);
        CheckpointFrame::encode_end(header.sequence(2), &end, &mut file);
        let file = file.into_vec();
        let Parsed::Frame(first) = read_frame(&file) else { panic!() };
        assert_eq!(first.sequence, 5 << 32);
        let CheckpointFrame::Runs(runs) = CheckpointFrame::decode(first.kind, first.body).unwrap()
        else {
            panic!()
        };
        assert_eq!(runs.map(Result::unwrap).collect::<Vec<_>>(), vec![image(1), image(2)]);
        let file = &file[first.bytes..];
        let Parsed::Frame(second) = read_frame(file) else { panic!() };
        assert_eq!(
            CheckpointFrame::decode(second.kind, second.body).unwrap(),
            CheckpointFrame::Retained(retained)
        );
        let Parsed::Frame(last) = read_frame(&file[second.bytes..]) else { panic!() };
        assert_eq!(last.bytes, CheckpointFrame::END_BYTES);
        assert_eq!(
            CheckpointFrame::decode(last.kind, last.body).unwrap(),
            CheckpointFrame::End(end)
        );
    }

    #[test]
    fn malformed_run_is_an_error_and_ends_iteration() {
        let mut runs = Runs(Reader::new(&[1; 40]));
        assert!(runs.next().unwrap().is_err());
        assert!(runs.next().is_none());
    }
}

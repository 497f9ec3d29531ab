//! The reservation log: the space to which client processes may still write. A head, which is a
//! whole-file record (module `whole_file`) without a body, precedes the records.

use crate::whole_file::{SEAL_BYTES, seal, unseal};
use crate::wire::{Reader, Writer};
use crate::{ErrorKind, Extent, Result, SegmentId, checksum};

const MAGIC: &[u8; 8] = b"RTRNRESV";

/// One record of the reservation log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReservationRecord {
    /// Space was reserved for a client.
    Reserved {
        /// The reservation's number.
        id: u64,
        /// The client's name, which is also the name of a file in the store's folder `clients`. The
        /// client keeps this file locked while it runs.
        client: String,
        /// The extents to which the client may write.
        extents: Vec<Extent>,
    },
    /// The reservation was committed or aborted, or its client died. Writes that a dead client
    /// began may still reach the reserved space, so the owner withholds it, in memory only, until
    /// they have ended.
    Ended {
        /// The reservation's number.
        id: u64,
    },
}

impl ReservationRecord {
    /// Encodes the record: length `u32` of the body, body, CRC-64 of length and body.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Writer::new();
        match self {
            Self::Reserved { id, client, extents } => {
                body.u8(1).u64(*id).blob(client.as_bytes()).u32(extents.len() as u32);
                for extent in extents {
                    body.u32(extent.segment.0).u32(extent.start).u32(extent.units);
                }
            }
            Self::Ended { id } => {
                body.u8(2).u64(*id);
            }
        }
        let mut record = Writer::new();
        record.blob(body.as_slice());
        let sum = checksum(record.as_slice());
        record.u64(sum);
        record.into_vec()
    }

    /// Encodes a log of `records`.
    #[must_use]
    pub fn encode_log(records: &[Self]) -> Vec<u8> {
        let mut log = seal(MAGIC, &[]);
        records.iter().for_each(|record| log.extend(record.encode()));
        log
    }

    /// Decodes a log: its records until it ends or a record is damaged (a torn tail). A log without
    /// an intact head decodes to no records: a power loss can tear the head of the unsynced log,
    /// but also ends all clients, so no reservation remains.
    ///
    /// # Errors
    /// `Invalid` if the log is of another version or with unknown features.
    pub fn decode_log(log: &[u8]) -> Result<Vec<Self>> {
        let mut records = Vec::new();
        if !log.starts_with(MAGIC) {
            return Ok(records);
        }
        let head = match unseal(MAGIC, "reservation log", log) {
            Ok(body) => SEAL_BYTES + body.len(),
            Err(error) if error.kind() == ErrorKind::Invalid => return Err(error),
            Err(_) => return Ok(records),
        };
        let mut reader = Reader::new(&log[head..]);
        while let Ok(record) = Self::decode(&mut reader) {
            records.push(record);
        }
        Ok(records)
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        let whole = reader.rest();
        let body = reader.blob()?;
        let sum = reader.u64()?;
        if sum != checksum(&whole[..4 + body.len()]) {
            return Err(crate::Error::miss("a reservation record is damaged"));
        }
        let mut body = Reader::new(body);
        match body.u8()? {
            1 => {
                let (id, client) = (body.u64()?, body.text()?);
                let count = body.u32()?;
                let mut extents = Vec::new();
                for _ in 0..count {
                    extents.push(Extent {
                        segment: SegmentId(body.u32()?),
                        start: body.u32()?,
                        units: body.u32()?,
                    });
                }
                Ok(Self::Reserved { id, client, extents })
            }
            2 => Ok(Self::Ended { id: body.u64()? }),
            _ => Err(crate::Error::miss("a reservation record is of an unknown kind")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torn_record_leaves_earlier_records_readable() {
        let first = ReservationRecord::Reserved {
            id: 1,
            client: "c".into(),
            extents: vec![Extent { segment: SegmentId(2), start: 3, units: 4 }],
        };
        let second = ReservationRecord::Ended { id: 1 };
        let decoded = |log: &[u8]| ReservationRecord::decode_log(log).unwrap();
        let mut log = ReservationRecord::encode_log(std::slice::from_ref(&first));
        let whole = log.len();
        log.extend(second.encode());
        assert_eq!(decoded(&log), vec![first.clone(), second]);
        for cut in whole..log.len() {
            assert_eq!(decoded(&log[..cut]), vec![first.clone()]);
        }
        for cut in 0..whole {
            assert_eq!(decoded(&log[..cut]), vec![]);
        }
        log[whole + 6] ^= 1;
        assert_eq!(decoded(&log), vec![first]);
    }
}

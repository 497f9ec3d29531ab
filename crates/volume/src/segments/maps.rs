//! The memory maps of segments, for stores whose directories are in memory.

use super::Segments;
use crate::map::Map;
use parking_lot::{Mutex, RwLock};
use ritornello_format::SegmentId;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Minimum interval between two searches for removed segments that this process still maps: a map
/// keeps the memory of its segment allocated. Accesses to segments start the searches.
const SWEEP_INTERVAL: Duration = Duration::from_secs(2);

/// Pause before huge pages are requested again, after the kernel had none free or took long. A put
/// that creates a segment waits while the kernel answers such a request.
const HUGE_PAUSE: Duration = Duration::from_secs(10);

/// Maps by segment; `None` for a segment that is not in memory or cannot be mapped, and is
/// therefore accessed by system calls.
pub(super) struct Maps {
    pub(super) open: RwLock<HashMap<SegmentId, Option<Arc<Map>>>>,
    swept: Mutex<Instant>,
    /// The time until which no huge pages are requested.
    huge_paused: Mutex<Option<Instant>>,
}

impl Maps {
    pub(super) fn new() -> Self {
        Self {
            open: RwLock::default(),
            swept: Mutex::new(Instant::now()),
            huge_paused: Mutex::default(),
        }
    }

    /// Lets no huge pages be requested for [`HUGE_PAUSE`].
    pub(super) fn pause_huge(&self) {
        *self.huge_paused.lock() = Some(Instant::now() + HUGE_PAUSE);
    }

    pub(super) fn is_huge_paused(&self) -> bool {
        self.huge_paused.lock().is_some_and(|until| Instant::now() < until)
    }

    /// The map of a segment. Calls `map` to make it if the segment is not mapped yet.
    fn get(
        &self,
        id: SegmentId,
        map: impl FnOnce() -> io::Result<Option<Map>>,
    ) -> io::Result<Option<Arc<Map>>> {
        if let Some(found) = self.open.read().get(&id) {
            return Ok(found.clone());
        }
        let made = map()?.map(Arc::new);
        Ok(self.open.write().entry(id).or_insert(made).clone())
    }

    /// The segments that are mapped here and whose files were removed. Searches at most once every
    /// `SWEEP_INTERVAL`, and returns none in between.
    fn removed(&self) -> Vec<SegmentId> {
        let Some(mut swept) = self.swept.try_lock().filter(|at| at.elapsed() >= SWEEP_INTERVAL)
        else {
            return Vec::new();
        };
        *swept = Instant::now();
        let is_removed = |map: &Option<Arc<Map>>| {
            map.as_ref().is_some_and(|map| map.file_bytes().is_ok_and(|bytes| bytes == 0))
        };
        let open = self.open.read();
        open.iter().filter(|(_, map)| is_removed(map)).map(|(id, _)| *id).collect()
    }
}

impl Segments {
    /// Whether this process accesses segments through maps.
    pub(crate) fn is_mapped(&self) -> bool {
        self.maps.is_some()
    }

    /// The map of a segment; `None` if the segment is not in memory, or cannot be mapped.
    pub(crate) fn map(&self, id: SegmentId) -> io::Result<Option<Arc<Map>>> {
        let Some(maps) = &self.maps else { return Ok(None) };
        for removed in maps.removed() {
            self.close(removed);
        }
        maps.get(id, || {
            let file = self.file(id)?;
            if !self.volume(id).in_memory {
                return Ok(None);
            }
            Map::new(&file, self.segment_bytes).or_else(|error| {
                tracing::warn!(%error, segment = id.number(), "a segment cannot be mapped");
                Ok(None)
            })
        })
    }
}

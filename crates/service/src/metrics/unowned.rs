//! The metrics of a store that no process owns, from its files.

use super::families::{Rows, label};
use super::names;
use ritornello_store::StoredStats;

/// Adds the metrics of a store whose files have the contents `stored`.
pub(super) fn add(rows: &mut Rows<'_>, stored: &StoredStats) {
    rows.gauge(
        &names::STORE_INFO,
        [("uuid", label(&stored.uuid)), ("index", label(&stored.index))],
        1_u64,
    );
    rows.gauge(&names::CAPACITY, [], stored.capacity_bytes);
    rows.gauge(&names::SEGMENTS, [], stored.segments);
    rows.gauge(&names::OWNER_EPOCH, [], u64::from(stored.owner_epoch));
    rows.gauge(&names::PROBLEMS, [], stored.problems.len() as u64);
    if let Some(scopes) = stored.scopes {
        rows.gauge(&names::SCOPES, [], scopes);
    }
    if let Some(checkpoint) = &stored.checkpoint {
        rows.gauge(&names::CHECKPOINT_PAGES, [], checkpoint.pages);
    }
    for volume in &stored.paths {
        let labels = || [("volume", label(&volume.dir))];
        rows.gauge(&names::VOLUME_PRESENT, labels(), u64::from(volume.absent.is_none()));
        rows.gauge(&names::VOLUME_SEGMENTS, labels(), volume.segments);
        rows.gauge(&names::VOLUME_DRAINING, labels(), u64::from(volume.draining));
    }
}

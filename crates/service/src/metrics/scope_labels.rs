//! The series of scopes: one for each of the largest scopes, and one, `other`, for the sum of the
//! remaining scopes.

use super::families::{Rows, label};
use super::names;
use crate::limits::SCOPES_MAX;
use ritornello_store::CatalogStats;

/// The value of the labels `scope` and `model` of the series that adds up all scopes beyond the
/// [`SCOPES_MAX`] largest.
const OTHER: &str = "other";

/// Adds the series of scopes.
pub(super) fn add(rows: &mut Rows<'_>, stats: &CatalogStats) {
    let (mut pages, mut bytes, mut retained) = (0, 0, 0);
    for scope in stats.largest_scopes.iter().take(SCOPES_MAX) {
        let labels = || [("scope", label(&scope.id)), ("model", label(&scope.model))];
        rows.gauge(&names::SCOPE_PAGES, labels(), scope.pages);
        rows.gauge(&names::SCOPE_USED, labels(), scope.bytes);
        rows.gauge(&names::SCOPE_RETAINED, labels(), scope.retained_bytes);
        if let Some(quota) = scope.quota_bytes {
            rows.gauge(&names::SCOPE_QUOTA, labels(), quota);
        }
        pages += scope.pages;
        bytes += scope.bytes;
        retained += scope.retained_bytes;
    }
    if stats.scopes <= SCOPES_MAX as u64 {
        return;
    }
    let labels = || [("scope", OTHER.to_owned()), ("model", OTHER.to_owned())];
    let used = stats.used_bytes.saturating_sub(stats.deferred_bytes);
    rows.gauge(&names::SCOPE_PAGES, labels(), stats.pages.saturating_sub(pages));
    rows.gauge(&names::SCOPE_USED, labels(), used.saturating_sub(bytes));
    rows.gauge(&names::SCOPE_RETAINED, labels(), stats.retained_bytes.saturating_sub(retained));
}

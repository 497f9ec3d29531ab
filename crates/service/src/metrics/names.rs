//! The names, units and help texts of all metrics.

use super::families::Definition;
use super::families::Measure::{self, Bytes, Count, Ratio, Seconds};

const fn of(name: &'static str, measure: Measure, help: &'static str) -> Definition {
    Definition { name, measure, help }
}

macro_rules! names {
    ($($constant:ident = ($name:literal, $measure:ident, $help:literal);)*) => {
        $(pub(super) const $constant: Definition = of($name, $measure, $help);)*
        /// The definitions of all metrics, for tests.
        #[cfg(test)]
        pub(super) const ALL: &[&Definition] = &[$(&$constant),*];
    };
}

names! {
    BUILD_INFO = ("build_info", Count, "Always 1; the labels describe the service");
    UP = ("up", Count, "Whether the state of the store is known, from its owner or its files");
    OWNED = ("owned", Count, "Whether a process owns the store and answers");
    OBSERVATION = ("observation", Seconds, "Duration of the observation of the store");
    STORE_INFO = ("store_info", Count, "Always 1; the labels describe the store");
    POISONED = ("poisoned", Count,
        "Whether a write or sync failed and the store is not reopened yet");
    REOPENINGS = ("reopenings", Count,
        "Times that the owner reopened the store after a failed write or sync");
    OWNER_EPOCH = ("owner_epoch", Count,
        "Openings of the store by an owner since it was created, plus 65,536 for each restore");
    OPEN = ("open", Seconds, "Duration of the last opening");
    DROPPED_AT_OPEN = ("dropped_at_open", Count, "Items that the last opening dropped or repaired");
    WARNINGS = ("warnings", Count, "Warnings about the disks");
    PROBLEMS = ("problems", Count, "Files of a store without an owner that are damaged or missing");

    PAGES = ("pages", Count, "Pages in the index");
    RUNS = ("runs", Count, "Runs in the index");
    CHECKPOINT_PAGES = ("checkpoint_pages", Count,
        "Pages in the newest checkpoint of a store without an owner");
    PROBES = ("probes", Count, "Lookups of prefixes");
    PROBED_PAGES = ("probed_pages", Count, "Pages requested by lookups");
    HIT_PAGES = ("hit_pages", Count, "Pages found by lookups");
    MISSED_PAGES = ("missed_pages", Count,
        "Pages requested by lookups and not found, by why the first of them is missing");
    PROBE = ("probe", Seconds,
        "Durations of a sample of the lookups of prefixes, one in 16, of all processes");
    PUT = ("put", Seconds, "Durations of puts that wrote pages, of all processes");
    GET = ("get", Seconds, "Durations of gets of registered scopes, of all processes");
    PUT_RAW = ("put_raw", Bytes,
        "Bytes of pages that puts wrote, before encoding, of all processes");
    PUT_ENCODED = ("put_encoded", Bytes,
        "Bytes of pages that puts wrote, after encoding, of all processes");
    READ = ("read", Bytes, "Bytes of pages delivered by gets, of all processes");
    READ_PAGES = ("read_pages", Count, "Pages delivered by gets, of all processes");
    UNDELIVERED_PAGES = ("undelivered_pages", Count,
        "Pages located and not delivered by gets, of all processes");
    UNSTAGED_PAGES = ("unstaged_pages", Count,
        "Pages that puts did not copy and store because staging was full, of all processes");
    UNANSWERED_CALLS = ("unanswered_calls", Count,
        "Lookups and gets answered with a miss, and puts skipped, because the owner did not respond \
        or reopened the store, of all processes");
    DECISIONS = ("decisions", Count, "Decisions about the pages of requests, of all processes");
    DROPPED_DECISIONS = ("dropped_decisions", Count,
        "Decisions that did not fit the buffer of their process");
    PREFILL_AVOIDED_TOKENS = ("prefill_avoided_tokens", Count,
        "Tokens of requests that were loaded and not computed, of all processes");
    PREFILL_UNTIMED_TOKENS = ("prefill_untimed_tokens", Count,
        "Tokens of requests that were loaded while no prefill of the engine was measured");
    PREFILL_AVOIDED = ("prefill_avoided", Seconds,
        "Estimated time to compute the tokens that were loaded, without untimed tokens");
    PREFILL_LOAD = ("prefill_load", Seconds,
        "Time of loads, including failed loads, without loads of untimed tokens");
    GATE_DECISIONS = ("gate_decisions", Count,
        "Lookups by how many of the found pages the gate decided to load, of all processes");
    GATE_LOAD = ("gate_load", Seconds, "Time of loads for which gates had an estimate");
    GATE_REGRET = ("gate_regret", Seconds,
        "Time of loads for which gates had an estimate, and of computing the rest, beyond the \
        estimated time to compute all tokens");
    QUEUED_CALLS = ("queued_calls", Count,
        "Submitted gets and puts that wait for a thread, of all processes");
    QUEUED = ("queued", Bytes,
        "Bytes that wait to be written or promoted to a tier, of all processes");
    LOADING = ("loading", Bytes,
        "Bytes of queued and running loads of caches from a tier, of all processes");
    REMOTE_CALLS = ("remote_calls", Count,
        "Calls to remotes, of all processes: calls made (by kind), failed calls, calls not made");
    REMOTE_CALL = ("remote_call", Seconds,
        "Durations of attempts to read (get) or write (put) an object of remotes, of all processes");
    REMOTE_READ = ("remote_read", Bytes, "Bytes of objects read from remotes");
    REMOTE_WRITTEN = ("remote_written", Bytes, "Bytes of objects written to remotes");
    REMOTE_BREAKER_OPENINGS = ("remote_breaker_openings", Count,
        "Times that circuit breakers of remotes opened");
    REMOTE_BREAKER_OPEN = ("remote_breaker_open", Seconds,
        "Time that circuit breakers of remotes were open, summed over caches of all processes");
    STORED_PAGES = ("stored_pages", Count, "Pages committed");
    PRESENT_PAGES = ("present_pages", Count, "Pages of puts that were stored already");
    REFUSED_PAGES = ("refused_pages", Count, "Pages of puts that were not stored");
    REFUSED_SCOPES = ("refused_scopes", Count, "New scopes refused because the registry is full");
    EVICTED_PAGES = ("evicted_pages", Count, "Pages evicted, by cause");
    DELETED_PAGES = ("deleted_pages", Count,
        "Pages deleted by callers, or with their scope or directory");
    DAMAGED_PAGES = ("damaged_pages", Count, "Pages removed because they failed verification");

    CAPACITY = ("capacity", Bytes, "Maximum bytes of segments and metadata");
    ALLOCATED = ("allocated", Bytes, "Bytes of segment files and of the index's files");
    USED = ("used", Bytes, "Bytes held by runs");
    FREE = ("free", Bytes, "Free bytes in existing segments that are not being emptied");
    RESERVE = ("reserve", Bytes, "Bytes that are kept free");
    LIMBO = ("limbo", Bytes, "Freed bytes that are not reused before the next sync");
    DEFERRED = ("deferred", Bytes, "Bytes of removed runs that are freed when their leases end");
    RESERVED = ("reserved", Bytes,
        "Bytes that puts are writing, or that are withheld until writes of dead processes are \
        drained");
    QUARANTINED = ("quarantined", Bytes, "Bytes in quarantine");
    RETAINED = ("retained", Bytes, "Retained bytes");
    PADDING = ("padding", Bytes, "Bytes of padding behind pages");
    SEALED = ("sealed", Bytes, "Bytes of segments that are being emptied");
    SEGMENTS = ("segments", Count, "Segment files");
    SEGMENTS_MAX = ("segments_max", Count, "Segment files that the capacity allows");
    EXTENTS_PER_RUN = ("extents_per_run", Count, "Mean extents per stored run");
    ABSENT_RUNS = ("absent_runs", Count,
        "Runs in absent directories or segments, which lookups miss");
    ABSENT_SPACES = ("absent_spaces", Count, "Absent directories and segments");

    VOLUME_USED = ("volume_used", Bytes, "Used bytes of the segments in a directory");
    VOLUME_SEGMENTS = ("volume_segments", Count, "Segment files in a directory");
    VOLUME_PRESENT = ("volume_present", Count, "Whether a directory can be used");
    VOLUME_DRIVE_WRITTEN = ("volume_drive_written", Bytes,
        "Bytes that all programs wrote to the drive of a directory since the kernel attached it");
    VOLUME_DRAINING = ("volume_draining", Count, "Whether a directory is being drained");

    ADMITTED = ("admitted", Bytes, "Bytes of committed pages, before encoding");
    WRITTEN = ("written", Bytes, "Bytes written, by cause");
    WRITE_AMPLIFICATION = ("write_amplification", Ratio,
        "Bytes written to segments over bytes of committed pages, since the store was opened");
    SYNCS = ("syncs", Count, "Sync rounds");
    SYNC = ("sync", Seconds, "Time spent in sync rounds");
    RECLAIM_WAITS = ("reclaim_waits", Count, "Waits for a sync round to get space for a run");
    RUNS_ABANDONED = ("runs_abandoned", Count, "Reserved runs that did not become visible");
    RUNS_FAILED = ("runs_failed", Count, "Runs that the file system failed to write");
    RUNS_MOVED = ("runs_moved", Count, "Runs moved to another place");
    SEGMENTS_REMOVED = ("segments_removed", Count, "Segment files removed");
    SCRUBBED = ("scrubbed", Bytes, "Bytes read by the scrubber");
    SCRUBBED_RUNS = ("scrubbed_runs", Count, "Runs read by the scrubber");
    SCRUB_DAMAGED_PAGES = ("scrub_damaged_pages", Count, "Damaged pages found by the scrubber");

    LEASES = ("leases", Count, "Current leases");
    LEASES_EXPIRED = ("leases_expired", Count, "Leases that expired before they were released");
    LEASES_SHORTENED = ("leases_shortened", Count, "Leases shortened to the client's share");
    FOREIGN_RELEASES = ("foreign_releases", Count,
        "Releases of leases that the client did not hold");
    CLIENTS = ("clients", Count, "Connected clients");
    RESERVATIONS = ("reservations", Count, "Puts in progress");
    RUNS_RETAINED = ("runs_retained", Count, "Runs retained, or retained for longer");
    RETENTIONS_DISPLACED = ("retentions_displaced", Count,
        "Retentions refused or ended early by a limit");
    RETENTIONS_LAPSED = ("retentions_lapsed", Count, "Retentions that expired");

    GHOST_PAGES = ("ghost_pages", Count, "Refused pages that admission remembers");
    WRITE_BUDGET_PER_DAY = ("write_budget_per_day", Bytes, "Bytes that may be written per day");
    WRITE_BUDGET_AVAILABLE = ("write_budget_available", Bytes, "Bytes that may be written now");
    EVICTION_SWITCHES = ("eviction_switches", Count,
        "Changes of the eviction policy that the store follows");
    EVICTION_FOLLOWED = ("eviction_followed", Count,
        "Whether the store follows this eviction policy now");
    SHADOW_REQUESTED_PAGES = ("shadow_requested_pages", Count,
        "Sampled pages requested from the shadow cache of a policy");
    SHADOW_HIT_PAGES = ("shadow_hit_pages", Count, "Sampled pages that a policy would have kept");

    INDEX_MEMORY = ("index_memory", Bytes, "Memory of the index");
    INDEX_MEMORY_MAX = ("index_memory_max", Bytes, "Memory ceiling of the index");
    INDEX_DISK = ("index_disk", Bytes, "Bytes of the index's files");
    INDEX_SIZE_RATIO = ("index_size_ratio", Count, "Size ratio (T) of an index that tunes itself");
    INDEX_RUNS_PER_LEVEL = ("index_runs_per_level", Count,
        "Maximum sorted runs per level (K) of an index that tunes itself");
    INDEX_LEVELS = ("index_levels", Count, "Levels of an index that tunes itself");
    INDEX_SORTED_RUNS = ("index_sorted_runs", Count, "Sorted runs of an index that tunes itself");

    SCOPES = ("scopes", Count, "Registered scopes");
    SCOPES_DROPPED = ("scopes_dropped", Count, "Empty scopes that a full registry dropped");
    SCOPE_PAGES = ("scope_pages", Count, "Pages of a scope");
    SCOPE_USED = ("scope_used", Bytes, "Bytes on disk of a scope");
    SCOPE_QUOTA = ("scope_quota", Bytes, "Maximum bytes on disk of a scope");
    SCOPE_RETAINED = ("scope_retained", Bytes, "Retained bytes of a scope");
}

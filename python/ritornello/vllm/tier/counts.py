"""Counters of the tier, besides the counters that vLLM's tiering manager keeps for every tier."""

from ritornello.connector.cache_counts import CACHE_COUNTERS, help_by_reason

PREFIX = "vllm:kv_offload_ritornello_"
# By name, without `PREFIX`: the help text, and whether the counter has a label `reason`.
COUNTERS = {
    "lookups": ("Calls to the store that answered lookups; one call answers many chunks.", False),
    "lookup_seconds": ("Time of the calls that answered lookups, in seconds.", False),
    "failed_chunks": ("Chunks that a lookup promised and a load did not fill, by reason.", True),
    "skipped_chunks": ("Chunks that were offered and not stored, by reason.", True),
    "ignored_retentions": (
        "Requests to retain pages that the store's policy does not permit.",
        False,
    ),
    "errors": ("Failed operations, such as calls to the store, by operation.", True),
    # Counters that exist only with several tiers.
    **{name: (text, False) for name, text in CACHE_COUNTERS.items()},
    **{name: (text, True) for name, text in help_by_reason("chunks").items()},
}

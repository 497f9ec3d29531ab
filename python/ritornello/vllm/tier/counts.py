"""Counters of the tier, besides the counters that vLLM's tiering manager keeps for every tier."""

# Name on /metrics, help text, and whether the counter has a label `reason`.
PREFIX = "vllm:kv_offload_ritornello_"
COUNTERS = {
    "lookups": ("Calls to the store that answered lookups; one call answers many chunks.", False),
    "lookup_seconds": ("Time of the calls that answered lookups, in seconds.", False),
    "failed_chunks": ("Chunks that a lookup promised and a load did not fill, by reason.", True),
    "skipped_chunks": ("Chunks that were offered and not stored, by reason.", True),
    "ignored_retentions": (
        "Requests to retain pages that the store's policy does not permit.",
        False,
    ),
    "errors": ("Calls to the store that failed, by call.", True),
}

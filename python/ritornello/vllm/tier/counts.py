"""Counters of the tier, besides the counters that vLLM's tiering manager keeps for every tier."""

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
    "gate_decisions": (
        "Decisions of the gate to load all, some or none of the found chunks.",
        True,
    ),
    "gate_load_seconds": ("Seconds of the loads whose duration the gate had estimated.", False),
    "gate_regret_seconds": (
        "Seconds by which loads, with the estimated time to compute the tokens after them, "
        "exceeded the estimated time to compute without a load.",
        False,
    ),
    "prefetches": ("Prefetches from the remote, by outcome.", True),
    "tier_written_pages": ("Chunks written to a tier from the tier above, by tier.", True),
    "tier_dropped_pages": (
        "Chunks not written to a tier because its queue was full or the write failed, by tier.",
        True,
    ),
    "tier_lost_pages": (
        "Chunks not written to a tier because no other tier could supply them, by tier.",
        True,
    ),
    "remote_calls": (
        "Calls to the remote: made (calls), failed (failures), and skipped after failures or "
        "while all threads were busy (spared).",
        True,
    ),
}

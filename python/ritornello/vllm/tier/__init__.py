"""Ritornello as a secondary tier of vLLM's own offloading: `ritornello.vllm.RitornelloTier`.

vLLM copies KV between the device and its host tier; this tier copies between the host tier and the
store. The tier runs in the scheduler's process. vLLM calls its methods one at a time, and the
scheduler waits for each call, so the methods, except `drain_jobs` and `shutdown`, must return
within milliseconds: the store's threads move bytes, and other threads call the process that owns
the store.

A *chunk* is vLLM's word for a page of the host tier: some consecutive blocks of one KV cache group.
Only `manager` imports vLLM.

    manager        vLLM's interface, in vLLM's types
    tier           requests and jobs
    requests       state of a request
    store_lookups  lookups in one store
    cache_lookups  lookups in a cache over several tiers
    sequence       which keys are consecutive in a request
    jobs           loads and puts in progress
    host_rows      the host tier's rows, as pages
    store          the store as a scheduler may use it: its calls neither raise nor block
    cache          a cache over several tiers, with calls that neither raise nor block
    call_thread    calls that may wait for the process that owns the store
    namespace      properties besides tokens that decide whether a chunk may be reused
    settings       the user's settings
    counts         counters in addition to vLLM's counters of every tier
    interface      checks that the installed vLLM has the tested interface
"""

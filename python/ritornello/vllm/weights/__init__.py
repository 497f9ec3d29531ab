"""Whether the weights changed since vLLM's caches were last emptied.

Pages that were computed with other weights have the same keys. So every process of an engine counts
the changes it sees, in memory that all of them read. A cache that is known to be empty covers all
changes until then, and a new epoch begins; with a count above what the epoch covers nothing is
loaded and nothing is saved, in any process.

    counters     counts of changes, shared by the processes of a machine
    parameters   what tells that a model's parameters changed
    adapters     what tells that a LoRA adapter's files changed
    watch        the worker's side: hooks on what changes weights, and a look at each step
    guard        the scheduler's side: which changes an epoch covers
    engine       hooks on vLLM's engine core: installs the watches, and sees resets of the cache
"""

"""Detects changes of the weights since vLLM's caches were last emptied.

Pages that were computed with different weights have the same keys. Therefore every process of an
engine counts the changes it detects, in memory that all of them read (workers on other machines
report their counts). When all caches of the engine are known to be empty, a new epoch begins, which
covers all changes so far. While a count exceeds the count that the epoch covers, no process loads
or saves pages.

    counters     counts of changes, shared by the processes of a machine
    parameters   detects changes of a model's parameters
    adapters     detects changes of a LoRA adapter's files
    watch        the worker's side: hooks on what changes weights, and checks of the weights
    guard        the scheduler's side: which changes an epoch covers
    engine       hooks on vLLM's engine core: installs the watches, observes resets of the cache
"""

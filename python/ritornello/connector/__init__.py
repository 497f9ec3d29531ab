"""Common parts of the adapters for vLLM, SGLang and LMCache. An adapter supplies how its engine
states a fact; the rule that follows from the fact is here.

    identity            the description of a model in the scopes of its pages
    weight_fingerprint  the digest by which weights are recognised
    settings            the user's settings of a store
    opening             opens a store by its settings
    fail_safe           the store whose failures are misses, and which reopens itself
    strided_blocks      an engine's memory as pages
"""

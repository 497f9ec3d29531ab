"""Common parts of the adapters for vLLM, SGLang and LMCache. An adapter supplies how its engine
states a fact; the rule that follows from the fact is here.

    identity            what decides, besides tokens, whether the bytes of a page may be reused
    weight_fingerprint  the digest by which weights are recognised
    interface           checks that an installed engine has the interface that was tested
    settings            the user's settings of a store
    opening             opens a store by its settings
    fail_safe           the store whose failures are misses, and which reopens itself
    meter               counters
    strided_blocks      an engine's memory as pages
"""

"""Ritornello as a secondary tier of vLLM's own offloading: `ritornello.vllm.RitornelloTier`.

vLLM copies KV between the device and its host tier; this tier copies between the host tier and the
store. It lives in the scheduler's process, and every one of its methods runs there under one lock,
so none may wait: bytes move on the store's threads, and so do questions to another process.

`door` is the only module that imports vLLM.

    door         what vLLM calls, in vLLM's types
    tier         what is done about it: requests, answers, jobs
    sequence     which keys follow upon each other in a request
    jobs         loads and stores under way
    memory       the host tier's rows, as pages
    store        the store as a scheduler may use it: no exception, no wait
    namespace    everything besides tokens that decides whether a chunk may be reused
    settings     what a user may say
    counts       what is counted beside what vLLM counts for every tier
    interface    whether this vLLM is one that we know
"""

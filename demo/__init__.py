"""Demonstrations of a store that a new process finds filled, for vLLM (`make demo`), for SGLang
(`make demo-sglang`) and for LMCache (`make demo-lmcache`); and of the node service beside an engine
(`make serve-demo`).
"""

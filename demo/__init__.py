"""Demonstrations of a store that a new process finds filled: of vLLM (`make demo`), of SGLang
(`make demo-sglang`) and of LMCache (`make demo-lmcache`).
"""

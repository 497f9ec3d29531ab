"""Measurements that run in Python.

`ritornello bench store` starts `probe`. `python -m ritornello.bench WORKLOAD` measures a serving
engine through its OpenAI API: `multi_round_qa`, `long_context` and `multi_turn` generate requests,
which `driver` sends through `client`. Then `summary` and `confidence` compute the results.
"""

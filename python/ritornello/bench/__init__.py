"""Measurements that need an interpreter.

`ritornello bench store` starts `probe`. `python -m ritornello.bench WORKLOAD` measures a serving
engine through its OpenAI API: `multi_round_qa`, `long_context` and `multi_turn` say what is asked,
`driver` asks it through `client`, `summary` and `confidence` say what came of it.
"""

"""The processes that `benches/gpu_vllm.py` starts."""

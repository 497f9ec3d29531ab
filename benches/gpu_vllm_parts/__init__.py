"""The engines of `benches/gpu_vllm.py`: their settings, and the processes that it starts."""

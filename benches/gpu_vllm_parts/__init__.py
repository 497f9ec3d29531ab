"""Parts of `benches/gpu_vllm.py`: the settings of its engines, and the processes it starts."""

"""The cells (benchmarks) of `benches/gpu.py`. Each function returns the rows of a cell's table."""

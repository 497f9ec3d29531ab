"""The cells of `benches/gpu.py`: each measures one thing, and returns rows for the report."""

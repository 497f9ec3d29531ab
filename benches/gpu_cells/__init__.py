"""The cells (benchmarks) of `benches/gpu.py`, and the parts that they share. A function whose only
parameter is a `Rig` is a cell: it returns the rows of the cell's table.
"""

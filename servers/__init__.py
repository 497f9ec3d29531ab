"""Servers that demonstrations, benchmarks and tests start: engines, S3, other programs; and loop
devices.
"""

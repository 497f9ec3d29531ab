"""Servers that demonstrations, benchmarks and tests start: engines, S3, and other programs."""

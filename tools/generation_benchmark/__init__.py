"""The implementation of `tools/benchmark_generation.py`."""

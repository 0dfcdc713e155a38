"""The parts of `tools/benchmark_generation.py`."""

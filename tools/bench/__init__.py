"""The implementation of `tools/benchmark.py`: workloads, runs and report."""

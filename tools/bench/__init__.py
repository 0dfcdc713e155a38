"""The parts of `tools/benchmark.py`: the workloads, how they run, and their report."""

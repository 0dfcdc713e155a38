"""The parts of `tools/benchmark.py`: the workloads, their runs, and the report."""

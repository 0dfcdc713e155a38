"""The parts of `tools/benchmark.py`: what is run, how it is launched, measured and told."""

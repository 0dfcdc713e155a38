"""The operations that tools/benchmark_kernels.py times.

Each file is a group, named in `GROUPS` of that tool, with a function
`operations(library, device) -> list[Operation]`.
"""

"""The operations that tools/benchmark_kernels.py times: a file a group, each with a function
`operations(library) -> list[Operation]`, named in `GROUPS` of that tool."""

"""Hot operations, one per module: plain PyTorch that defines the result, and faster code.

A function `choose_...` picks an implementation when a model is built, depending on flags, device
and the compiled CUDA kernels in a `library.KernelLibrary`. The kernels' sources are in the folder
`cuda`.
"""

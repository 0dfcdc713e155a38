"""Hot operations, one per module, each with a plain PyTorch reference and a faster implementation.

When a model is built, a function `choose_...` picks an implementation according to the flags, the
device and the compiled CUDA kernels in a `library.KernelLibrary`. The kernels' sources are in the
folder `cuda`.
"""

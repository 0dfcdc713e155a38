"""Hot operations, one per module, each with a plain PyTorch reference and a faster implementation.

When a model is built, a function `choose_...` selects an implementation, depending on the flags,
the device and the compiled CUDA kernels in a `library.KernelLibrary`. The sources of the kernels
are in the folder `cuda`.
"""

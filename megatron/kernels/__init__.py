"""Hot operations, one a file: plain PyTorch that says what is computed, and forms that are faster.

A function `choose_...` picks one when a model is built, by flags, device and the compiled CUDA
kernels, which are in a `library.KernelLibrary`; their sources are in the folder `cuda`.
"""

"""Hot operations, one per module: plain PyTorch that says what is computed, and faster forms.

A function `choose_...` picks a form when a model is built, by flags, device and the compiled CUDA
kernels in a `library.KernelLibrary`. The kernels' sources are in the folder `cuda`.
"""

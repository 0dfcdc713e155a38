"""Reads the files that Megatron-LM writes with `torch.save`, without running what is in them.

torch_zip   the container: named byte ranges in a zip file, memory-mapped
unpickler   the pickled tree, turned into inert records; executes and imports nothing
names       Megatron's parameter names, orders and splits, and ours
optimizer   which optimizer state belongs to which parameter
arguments   what the pickled command line says
reader      all of it behind the interface of `megatron.checkpoint.reader`
"""

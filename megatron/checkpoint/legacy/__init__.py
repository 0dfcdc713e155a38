"""Megatron-LM's files, read without running what is in them, and written for Megatron-LM 23.08.

Modules:
    torch_file  the zip container of torch.save, both ways, and the files of all ranks
    unpickler   the pickled tree as plain records; it executes and imports nothing
    names       Megatron's and Megatron Core's parameter names, orders and splits, and ours
    optimizer   which optimizer state belongs to which parameter
    arguments   the pickled command line
    reader      all of it behind the interface `Reader`
    file_plan   which parameter goes into which file, as data
    writer      any checkpoint, or a run's state, as such files
"""

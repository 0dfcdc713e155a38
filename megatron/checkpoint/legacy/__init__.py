"""Read Megatron-LM's files without executing their content, and write those of version 23.08.

Modules:
    torch_file  the zip container of torch.save, read and written, and the files of all ranks
    unpickler   the pickled tree as plain records; it executes and imports nothing
    names       Megatron's and Megatron Core's parameter names, orders and splits, and ours
    optimizer   which optimizer state belongs to which parameter
    arguments   the pickled command line
    reader      a Megatron-LM checkpoint through the interface `Reader`
    file_plan   which parameter goes into which file, as data
    writer      write any checkpoint, or a run's state, as such files
"""

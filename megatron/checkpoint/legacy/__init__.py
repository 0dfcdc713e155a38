"""Read Megatron-LM's files without running code from them, and write files of version 23.08.

Modules:
    torch_file  the zip container of torch.save, read and written, and the files of all ranks
    unpickler   a pickle as plain records, read without running or importing anything
    names       the names, row orders and splits of parameters, in Megatron's files and here
    optimizer   which optimizer state belongs to which parameter
    arguments   the pickled command line
    reader      a Megatron-LM checkpoint through the `Reader` interface
    file_plan   a plan of which parameter is written to which file
    writer      write any checkpoint, or a run's state, as such files
"""

"""Reads the files that Megatron-LM writes with `torch.save`, without running what is in them, and
writes such files.

Reading:
    rank_files    which files a checkpoint consists of
    torch_zip     the container: named byte ranges in a zip file, memory-mapped
    unpickler     the pickled tree, turned into inert records; executes and imports nothing
    optimizer     which optimizer state belongs to which parameter
    reader        all of it behind the interface of `megatron.checkpoint.reader`
Both ways:
    names         Megatron's parameter names, orders and splits, and ours; core_names: of its Core
    flat_states   the distributed optimizer's flat tensors
    arguments     the pickled command line
Writing:
    places        which parameter goes where, as a plan
    torch_file    the container and the pickled tree, a tensor at a time
    random_state  states of Megatron's generators
    writer        any checkpoint as such files
    mark          what of a folder's files is ours, and as we wrote it
    save          whole and durable, or not at all
"""

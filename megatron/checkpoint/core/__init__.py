"""Megatron Core's checkpoints in its `torch_dist` format, read without running code from them.

A folder contains `.metadata` (a pickle that says where each box of each tensor is),
`__<rank>_<n>.distcp` (the concatenated output of torch.save), `common.pt` (the command line, the
schedule, counters; since Core 0.19 a part of a `.distcp` file) and `metadata.json` (the format's
version). Random states and extra states are never read.

Megatron Core's older format, `torch`, uses Megatron-LM's file layout. It is written here, and read
by `legacy`.

Modules:
    index      `.metadata` as plain records, checked against the files
    names      Megatron Core's parameter names and native names
    rows       the order of rows where it differs, and tensors that Core divides
    arguments  Megatron Core's command line and our settings
    reader     such a folder through the `Reader` interface
    states     settings of the optimizer, random states and extra states
    writer     write any checkpoint, or a run's state, as such a folder
    torch_writer  write the content of the files in the older format
"""

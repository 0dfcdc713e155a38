"""Megatron Core's checkpoints in its `torch_dist` format, read without running code from them.

A folder contains `.metadata` (a pickle that says where each box of each tensor is),
`__<rank>_<n>.distcp` (the concatenated output of torch.save), `common.pt` (the command line, the
schedule, counters; since Core 0.19 a part of a `.distcp` file) and `metadata.json` (the format's
version). Random states and extra states are never read.

Modules:
    index      `.metadata` as plain records, checked against the files
    names      Megatron Core's parameter names and native names
    rows       the order of rows where it differs, and tensors that Core divides
    arguments  Megatron Core's command line and our settings
    reader     such a folder through the `Reader` interface
    writer     write any checkpoint, or a run's state, as such a folder
"""

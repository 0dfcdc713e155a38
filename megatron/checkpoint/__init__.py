"""Checkpoints: atomic, verified native files, and the formats of other programs.

A state is a dict of `Entry` by native name, such as "model.layers.0.attention.qkv.weight" or
"optimizer.layers.0.attention.qkv.weight.exp_avg". Each entry records which part of the whole tensor
it contains, so a checkpoint can be loaded by a run that splits the model differently.

The native format (safetensors and JSON):
    entries        tensors, dtypes, boxes of indices
    shard          one safetensors file, hashed while it is written
    mapped         a shard, mapped into memory through the descriptor that was checked
    manifest       manifest.json: every file and tensor of a checkpoint with digests
    plan           which process writes which part of which tensor
    exchange       JSON messages between processes
    non_persistent frequent checkpoints on local disks or in memory, with copies on other machines
    store          write a checkpoint collectively; convert any checkpoint to this format
    background     save while training continues
    trust          which files may be read at all
    find           which checkpoints a folder contains
    lock           only one job at a time saves into a folder
    retention      which older checkpoints are deleted
Reading:
    reader         the `Reader` interface of all formats; the native reader; `restore`
    meta           the types of a checkpoint's metadata
    merged         a checkpoint read with its adapters merged, or with averaged weights
    loading        open the newest intact checkpoint of a folder, in any format
    compatibility  whether a checkpoint fits the run's network and optimizer
    inspection     describe and compare checkpoints
Other formats:
    legacy         Megatron-LM's own files
    core           Megatron Core's torch_dist folders
    deepspeed      DeepSpeed's folders, as Megatron-DeepSpeed saves them
    huggingface    Hugging Face folders
"""

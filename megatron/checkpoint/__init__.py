"""Checkpoints that never lie: safetensors and JSON, written whole or not at all, verified on load.

    store.save(root, iteration, entries, meta, layout)      write one, collectively
    find.list_checkpoints(root)                             what is there to load, in which order
    reader.open_checkpoint(root)                            the newest one that verifies
    restore.restore(reader, entries)                        fill tensors, after checking all of them
    lock.SaveLock(root)                                     one job per folder
    any_format.open_any(path)                               whoever wrote it, wherever it lies

A state is a dict of `Entry` by name: "model.layers.0.attention.qkv.weight",
"optimizer.layers.0.attention.qkv.weight.exp_avg". Each entry knows where its tensor stands in
the whole one, so files do not depend on how the reader splits the model.
"""

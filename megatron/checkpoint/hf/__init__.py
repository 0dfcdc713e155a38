"""Hugging Face folders, in and out: safetensors and config.json, nothing of them executed.

    reader.HFReader(folder)                 a folder behind the interface of our own checkpoints
    writer.write_folder(folder, ...)        a checkpoint as such a folder

A family (`families.families`) says how config.json becomes network flags and back, and how each of
our parameters is made of the folder's tensors: a list of `rules.Rule`. Neither direction holds
more than the tensors that are being written.
"""

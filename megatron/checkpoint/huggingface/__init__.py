"""Read and write Hugging Face folders: safetensors and config.json. Nothing in them is executed.

    files       which files in a folder are read, and which of them are the tokenizer
    settings    config.json, checked key by key
    rules       the conversion between a folder's tensors and our parameters; the `Family` class
    families    the table of model families
    llama, mixtures, gpt2, bert, t5, ...   one module for each group of families
    reader      a folder through the `Reader` interface
    writer      write a checkpoint as such a folder
    peft        the tensors of adapters in PEFT's files, under native names and PEFT's
    peft_slices which part of a PEFT adapter corresponds to each of our adapters
    peft_reader, peft_writer               adapters, read from and written to PEFT's files

A family defines how config.json is converted to network flags and back, and which tensors
correspond to each parameter. In both directions, only the tensors that are being written are held
in memory.
"""

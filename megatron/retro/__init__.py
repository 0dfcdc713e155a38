"""Retro's preprocessing and retrieval: chunk database, embeddings, index, neighbors.

Retro (Borgeaud et al., 2022) cuts every sequence into chunks and attends, for each of them, to
similar chunks of a database. The working folder has the files of Megatron-LM 23.08.

    blocks          tables in HDF5 block files: which are missing, writing, checked reading
    database        documents cut into chunks, in tables; reading chunks
    workdir         args.json, what a folder was made from, and refusals
"""

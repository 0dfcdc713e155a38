"""Retro's preprocessing and retrieval: chunk database, embeddings, index, neighbors.

Retro (Borgeaud et al., 2022) cuts every sequence into chunks and attends, for each of them, to
similar chunks of a database. The working folder has the files of Megatron-LM 23.08.

    blocks          tables in HDF5 block files: which are missing, writing, checked reading
    database        documents cut into chunks, in tables; reading chunks
    embedding       vectors of texts, by a BERT or a sentence encoder
    index           faiss's index of the vectors, block by block
    neighbors       the chunks of a GPT's samples, and their neighbors
    dataset         samples of training, with the tokens of neighbors
    retriever       neighbors and passages for the chunks of any text
    workdir         args.json, what a folder was made from, and refusals
    estimate        disk and time, before the start
    command         the stages in order, for tools/retro/main.py
"""

"""Retro's preprocessing and retrieval: chunk database, embeddings, index, neighbors.

Retro (Borgeaud et al., 2022) divides every sequence into chunks. Each chunk attends to similar
chunks from a database. The working folder has the same files as in Megatron-LM 23.08.

    blocks          tables in HDF5 block files: finding missing blocks, writing, checked reading
    database        the chunk database: dividing documents into chunks, and reading chunks
    embedding       embeddings of texts, computed by a BERT or a sentence encoder
    index           the faiss index of the embeddings, built block by block
    neighbors       the chunks of GPT samples, and their neighbors
    dataset         training samples with the tokens of their neighbors
    retriever       neighbors and passages for the chunks of any text
    workdir         args.json, and the check that flags match a folder
    estimate        estimates of disk space and time
    command         the stages in order, for tools/retro/main.py
"""

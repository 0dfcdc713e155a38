"""Make a clean, deduplicated, decontaminated corpus from crawl files.

    plan            which steps the documents go through, as data
    sources         WARC, WET, JSON lines, parquet and text as documents; pieces of the input
    cleaning        one document: its address, main text, encoding, language, quality
    words           the words and n-grams of many documents at once, as hashes
    minhash         near-duplicates: signatures, equal bands, groups
    overlaps        overlaps with the files of evaluation tasks
    blocks          the steps as blocks of datatrove
    records         JSON lines in and out, for the commands of single steps
    report          what was left out and why: counts, samples, a picture, speed
    local           datatrove's local executor on our processes
    run             stages and executors: local processes, SLURM, Ray

It is a package and not a folder of scripts, because processes on other machines import the blocks.
Every result depends only on the input and the settings, never on the number of processes.
"""

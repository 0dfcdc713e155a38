"""Preparation of a clean, deduplicated, decontaminated corpus from crawl files.

    plan            the steps that the documents go through, as data
    sources         readers of WARC, WET, JSON lines, parquet and text; division into pieces
    cleaning        checks and fixes of one document: URL, main text, encoding, language, quality
    words           hashes of the words and n-grams of many documents, computed together
    minhash         near-duplicates: signatures, matching bands, groups
    overlaps        passages that also occur in evaluation tasks
    blocks          the steps as datatrove blocks
    records         JSON lines input and output, for the commands that run a single step
    report          what was dropped and why: counts, samples, a chart, speed
    local           datatrove's local executor, running on this package's processes
    run             stages and executors: local processes, SLURM, Ray

This is a package rather than a folder of scripts because processes on other machines import the
blocks. The results depend only on the input and the settings, never on the number of processes.
"""

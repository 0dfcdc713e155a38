"""Make a clean, deduplicated, decontaminated corpus from crawl files.

    words           the words and n-grams of many documents at once, as hashes
    minhash         near-duplicates: signatures, equal bands, groups

Every result depends only on the input and the settings, never on the number of processes.
"""

"""From crawl files to a clean, deduplicated, decontaminated corpus.

    words           the words and n-grams of many documents at once, as hashes
    minhash         near-duplicates: signatures, equal bands, groups

Every result depends on the input and the settings only, never on the number of processes.
"""

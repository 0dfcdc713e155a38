"""Conversion of text files to token ids, and of token ids to micro-batches.

    named                               names of corpora in a file of the user's
    preprocess, text_input              text to `.bin` and `.idx` files, before any training
    json_lines                          one JSON object per line, read or continued
    indexed                             reading and writing those files
    datasets, cache                     the datasets that the flags name: splits, blends, caches
    gpt                                 GPT samples and micro-batches
    fill_in_middle                      samples that teach a GPT to fill in the middle
    text_stream                         GPT samples straight from text, tokenized while training
    bert, t5                            BERT and T5 samples, which are made of sentences
    sentences, sentence_map, masking    runs of sentences, and the choice of the masked tokens
    ict, block_map                      a bi-encoder's samples: a sentence and the block around it
    packing, chat                         finetuning's samples: examples that share rows
    conversations, conversation_records   finetuning's examples: conversations and preferences
    mock                                generated tokens for all of them
    tfrecord                            ready-made samples of the original BERT
    logits                              files of a teacher's most likely tokens of every sample
    npy                                 token ids in numpy's files, which are converted
    sample, loader                      the form of a sample, the order of samples, batches

The order of samples is decided by pure functions of seed, data and counts, so a run can resume at
any sample. To add a kind of sample, write one module that calls `datasets.build_datasets`.
"""

"""Conversion of text files to token ids, and of token ids to micro-batches.

    named, remote                         names of corpora, and URLs of object storage
    preprocess, text_input                conversion of text to `.bin` and `.idx` files
    npy                                   token ids in `.npy` files of other trainers
    json_lines                            reading and appending to JSON lines files
    indexed                               reading and writing `.bin` and `.idx` files
    datasets, blend, cache                the datasets that the flags name: splits, blends, caches
    gpt                                   GPT samples and micro-batches
    ahead                                 inputs and labels of multi-token prediction
    fill_in_middle                        samples that teach a GPT to fill in the middle
    text_stream                           GPT samples from text that is tokenized during training
    bert, t5                              BERT and T5 samples, which are made of sentences
    sentences, sentence_map, masking      groups of sentences, and the choice of the masked tokens
    ict                                   bi-encoder samples: a sentence and the block around it
    packing, chat, preferences            finetuning samples: examples or pairs that share rows
    conversations, conversation_records   finetuning examples: conversations and preferences
    mock                                  generated tokens for each kind of sample
    tfrecord                              samples prepared by the original BERT's scripts
    logits                                files with a teacher's most likely tokens for each sample
    sample, loader                        sample fields, the order of samples, batches

The order of samples is determined by pure functions of seed, data and counts, so a run can resume
at any sample. To add a kind of sample, write one module that calls `datasets.build_datasets`.
"""

"""Command lines over the package, each with `main`. A script of the same name in tools/ runs it.

    preprocess_data      text to .bin/.idx files
    train_tokenizer      text to a vocabulary
    build_corpus         crawl files to a clean, deduplicated corpus
    show_data            the documents, samples and statistics of a dataset
    merge_datasets       several datasets to one
    split_json           JSON lines to training, validation and test files
    plot_loss            a picture of a loss curve
    demo, demo_kinds,
    demo_chat,
    demo_retro           all steps from text to a model that writes
    text_generation_cli  a client of the text generation server
    fill_in              the masked words of a text
    checkpoint           conversion between checkpoint formats

`megatron.cli.main` has most of them in its tables of commands.
"""

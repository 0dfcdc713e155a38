"""Command-line tools. Most have a `main`, which the script of the same name in tools/ calls.

    preprocess_data      turn text into .bin/.idx files
    train_tokenizer      train a tokenizer on text
    build_corpus         turn crawl files into a clean, deduplicated corpus
    show_data            show the documents, samples and statistics of a dataset
    merge_datasets       join several datasets into one
    split_json           split JSON lines into training, validation and test files
    plot_loss            draw a loss curve
    coordinate_check     check that muP keeps activations independent of the width
    demo, demo_kinds,
    demo_chat,
    demo_retro           run all steps from text to a model that generates text
    demo_detoxify        run all steps of detoxification
    text_generation_cli  the client of the text generation server (`megatron chat`)
    fill_in              fill in the masked words of a text
    bert_embedding       compute a vector for each text
    score                score answers with a reward model
    checkpoint           convert between checkpoint formats

The tables in `megatron.cli.main` list most of them as commands.
"""

"""A trained model at work.

    load, build     from a checkpoint to an `engine`
    engine          requests in, tokens out: `scheduler` plans a step, `executor` runs it,
                    `sampling` picks tokens, `cache` holds keys and values
    samples, score  many texts to files; how likely given ones are
    text            tokens that come one by one, as text that can be shown
    fill            hidden words, by a BERT or T5
    server          all of it over HTTP

Requests of all clients share the steps of one engine.
"""

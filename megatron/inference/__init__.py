"""A trained model at work: requests of all clients share the steps of one engine.

load, build       from a checkpoint to an `engine`
request           what goes into an engine and what comes out; `messages`: as JSON
engine            requests in, events out: `scheduler` plans a step, `executor` runs it,
                  `sampling` picks tokens, `cache` holds keys and values, `answers` say what
                  each request needs
worker            the loop of every rank that serves
samples, score    many texts to files; how likely given texts are
text              tokens that come one by one, as text that can be shown
fill              hidden words, by a BERT or T5
server            all of it over HTTP
"""

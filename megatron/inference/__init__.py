"""Text generation with a trained model. The requests of all clients share the steps of one engine.

load, build       build an `engine` from a checkpoint
request           requests and events, which `messages` carries between processes as JSON
engine            turns requests into events: `scheduler` plans a step, `executor` runs it,
                  `sampling` picks tokens, `cache` holds keys and values, `answers` keeps track
                  of each request's sequences and choices
speculation       drafts of the next tokens, all verified in one step
worker            the loop that every serving rank runs
samples, score    generate many texts into a file; compute the likelihood of texts
sharing           divides prompts among copies of the model, and collects their texts in order
text              turns tokens that arrive one by one into text that can be shown
fill              fills in masked words with a BERT or T5 model
retrieval         an executor for a Retro model, which reads passages while it generates
server            serves text generation over HTTP
"""

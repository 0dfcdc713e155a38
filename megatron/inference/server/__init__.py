"""Text generation over HTTP.

    client - HTTP -> front (one process)          -> rank 0 -> the other ranks
                     app, requests, text, stops      inbox      engine

The front holds the web server, the tokenizer and every limit, and imports no torch. Rank 0 starts
it; token ids alone pass between them, over one socket: requests down, events up.
"""

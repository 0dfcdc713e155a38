"""Text generation over HTTP.

    client - HTTP -> front (one process)                      -> rank 0 -> the other ranks
                     app, middleware, endpoint, openai_api,      run       engine
                     schema, megatron_api, chat, service

The front is the web server. It holds the tokenizer and every limit, and imports no torch. Rank 0
starts it with its `settings`. Only token ids pass between the two, over one socket: requests down,
events up.
"""

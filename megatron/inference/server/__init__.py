"""Text generation over HTTP.

    client - HTTP -> front (one process)                      -> rank 0 -> the other ranks
                     app, middleware, endpoint, openai_api,      run       engine
                     schema, megatron_api, service, texts    address

The front is the web server. It holds the tokenizer and enforces every limit, and does not import
torch. It renders chat templates and tokenizes texts in child processes (`texts`), which it can end
at any time. Rank 0 starts the front and sends it its `settings`. After that, the two exchange only
token ids over one socket: requests go to rank 0, and events come back.
"""

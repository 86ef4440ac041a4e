"""`dflash-mlx serve`: one thread that owns MLX, and the edge that asks it.

    app         builds the parts and runs them
    routes      path -> what answers, one table
    http/       requests and replies: sockets, limits, keys, hosts, the page
    dialects/   what vendors' clients send and expect: completions, messages, responses
    engine      the one thread that owns MLX
    alone       one job with DFlash
    batch       many jobs, mlx-lm's batch generator
    scoring     log-probabilities of a prompt
    picking     how a job's tokens are picked
    job         one request on its way
    tokens      a request to the ids of its prompt
    provider    the pair
    cache, disk prompt caches in memory and in files
    report      the `dflash` block of a reply
    metrics     Prometheus text
    errors      what a client is told when a request can't be answered

A half-closed connection counts as gone: its request ends.
Other modules of the package know nothing of this one; of its own, `http` and `dialects` know the engine, and the engine
knows neither.
"""

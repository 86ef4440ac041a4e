"""`dflash-mlx serve`: DFlash behind mlx-lm's server, one noun a file.

    app         builds the parts and runs them          server      the socket that listens
    tokens      a request to the ids of its prompt      handler     HTTP: the request, errors, the reply
    provider    the pair                                access      who may ask: keys, hosts, origins
    engine      the one thread that owns MLX            connections how many, which wait and which are answered
    alone       one job with DFlash                     routes      path -> function, one table
    scoring     log-probabilities of a prompt           fields      what a request may ask for, one table
    batch       many jobs, mlx-lm's batch generator     content     what types alone do not tell of it
    answer      text -> reasoning, answer, tool calls   completion  a chat or text completion, choice by choice
    logprobs    as the two routes show them             json_body   a body's JSON, its faults in words
    job         one request on its way                  cache, disk prompt caches in memory and in files
    report      the `dflash` block of a reply           metrics     Prometheus text
    unknown_fields  of requests, refused or told        status      health, models, metrics
    agents      routes of coding agents                 dialect     what their dialects share
    anthropic   the Messages dialect                    responses   the Responses dialect
    page/       the page at /

A half-closed connection counts as gone: its request ends.
Other modules of the package know nothing of this one.
"""

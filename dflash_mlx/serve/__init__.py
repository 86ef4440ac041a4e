"""`dflash-mlx serve`: DFlash behind mlx-lm's server, one noun a file.

    app         builds the parts and runs them          handler     HTTP: keys, limits, errors, the reply
    provider    the pair                                routes      path -> function, one table
    engine      the one thread that owns MLX            fields      what a request may ask for, one table
    alone       one job with DFlash                     completion  one chat or text completion
    batch       many jobs, mlx-lm's batch generator     answer      text -> reasoning, answer, tool calls
    job         one request on its way                  cache, disk prompt caches in memory and in files
    report      the `dflash` block of a reply           metrics     Prometheus text
    agents      routes of coding agents                 dialect     what their dialects share
    anthropic   the Messages dialect                    responses   the Responses dialect
    page/       the page at /

A half-closed connection counts as gone: its request ends.
Other modules of the package know nothing of this one.
"""

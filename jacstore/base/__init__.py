"""Words and tools that every room uses: sizes, limits, roundoffs, the machine, threads, progress, typed JSON.

`limits` and `precision` hold shared names and numbers; `options` declare what keywords and flags take; `schema` parses
JSON into declared types; `cgroups`, `machine`, `devices`, `threads` and `blas_threads` say what may be used; `indexing`
resolves ranges of rows; `events` and `leaving` tell of progress and of interruption. Nothing here knows what a Jacobian
is.
"""

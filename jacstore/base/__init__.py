"""Words and tools that every room uses: sizes, limits, modes, memory, roundoffs, threads, progress, typed JSON.

`limits`, `modes` and `precision` hold shared names and numbers; `options` declare what keywords and flags take;
`schema` parses JSON into declared types; `cgroups`, `machine`, `devices` and `threads` say what may be used, `budget`
who may take how much memory; `events` and `leaving` tell of progress and of interruption. Nothing here reads, writes
or multiplies a Jacobian.
"""

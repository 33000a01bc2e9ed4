"""Store -> kernel: tiles of J Jᵀ, planned, computed, checked and resumed.

`gram` runs the job: `plan/` decides tiles, items and slabs, `executors` hand items out, each `item` streams `slabs`
through an engine (`engines/`) with what its `context` keeps, `finish` puts tiles in place, `repair` and `resume` take
up what is there, `diagonal` compares with exact norms. `kernel` opens the result (`metadata`: its attributes), `lazy`
one that is never stored. Neither the user's function nor its parameters are needed here.
"""

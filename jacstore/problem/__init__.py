"""The user's function, probed and fingerprinted before any work.

`problem` declares it from `parameters`, `inputs` and `outputs` (trees of arrays by `pytrees`), `loading` finds it in
a file (`torch_problem` for PyTorch), `probes` test it (`twofold` compiles two copies at once), `fingerprint` hashes
what was asked for (`program` its operations, and keeps what was compiled for them), and `user_errors` turns errors of
the user's code into one line. No file of a store is read or written here.
"""

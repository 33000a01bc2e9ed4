"""Words in, lines out: the command line over the public API.

`commands` declares commands, `flags` makes their flags from the options of builds and grams, `config` takes values of
flags from a file, `terminal` runs one with progress and exit codes, `text` words the results (`reports`: those that the
API has no value for), `predict` reads and writes the files of `jacstore predict`.
"""

"""Words in, lines out: the command line over the public API.

`commands` declares commands and flags, `terminal` runs one with progress and exit codes, `text` words the results,
`predict` reads and writes the files of `jacstore predict`.
"""

"""J on disk or in RAM: whole units of examples are written, columns of all examples are read.

`layout` cuts `arrays` into units, chunks and files, `codec_choice` measures compression, `unit_buffers` collect a unit
in the form that `unit_form` checks, `writer` writes it if it is of the store that `requests` ask for, `constants` keep
what no example changes, `metadata` checks attributes, `reader` opens what is complete, `reports` say what it holds,
`norms` compares it with the exact squared norms. How rows were computed, and what is computed from them, is not known
here.
"""

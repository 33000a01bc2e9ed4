"""Problem -> store: Jacobians of batches of examples, computed once.

`build` runs the job that `options` describe, `trace/` cuts the backward pass before products that would form rows,
`device_pass` computes a batch, `row_check` compares it with plain gradients, `unit` collects batches for the writer,
`overlap` says how much of this goes on at once within the memory, `reports` are what a build says of itself; `torch/`
does the same for PyTorch modules. Kernels are not known here: both
meet in the store.
"""

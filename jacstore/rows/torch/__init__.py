"""PyTorch modules: the calls that multiply a parameter, the factors of its rows, and a store of them.

`network` prepares the module, `calls` sees each call with a parameter (`composed`: those that consist of several),
`hooks` record inputs and cotangents, `choose_terms` takes terms, `device_pass` computes a batch, `audit` compares it
with autograd, `build` runs the job. Needs the extra torch.
"""

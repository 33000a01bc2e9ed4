"""What a kernel answers: regression, posterior samples, attribution, training.

`kernel_matrix` reads any kernel, `weighted_kernels` scale it, `factorize` and `kernel_factor` factorize and solve
(`linalg/`; `kept_factors`: kept beside the kernel), `kernel_ridge`, `attribution`, `gradient_flow` and `posterior`
use it; `sampling_methods`, `noise` and `sample_tests` belong to posterior samples.
"""

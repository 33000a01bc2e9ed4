"""Stores of PyTorch modules; needs the extra `torch`.

import jacstore.torch

store = jacstore.torch.build(module.eval(), x, "run.jac", memory="8GB")
"""

from jacstore.problem.torch_problem import TorchProblem
from jacstore.rows.torch.build import build

__all__ = ["TorchProblem", "build"]

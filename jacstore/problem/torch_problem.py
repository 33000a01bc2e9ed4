"""The value that a target file defines for PyTorch: a module, its examples and the choice of outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TorchProblem:
    """A module, inputs and outputs for `jacstore.torch.build`, in a form that a target file can define.

    Attributes
    ----------
    module
        A torch.nn.Module in evaluation mode.
    inputs
        Tensors or arrays `(N, ...)`, a tuple or dict of them, or a map-style dataset.
    outputs
        "all", "sum" or indices into the flattened outputs of one example.
    """

    module: Any
    inputs: Any
    outputs: str | Sequence[int] = "all"

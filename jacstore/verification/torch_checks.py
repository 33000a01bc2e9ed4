"""Compare a store with the module it was built from: fingerprint, inputs, outputs, and recomputed rows.

Rows are recomputed by plain autograd in float64, one example and one output after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from jacstore.problem.torch_problem import TorchProblem
from jacstore.rows.torch.build import source_of
from jacstore.rows.torch.network import Network, calling, host, mapped, path_of, probe_module, requested, settings
from jacstore.store.reader import JacobianStore
from jacstore.verification.store_checks import StoreChecks
from jacstore.verification.target_checks import Plain, TargetChecks


class TorchChecks(TargetChecks):
    """The checks of `TargetChecks` against a module of PyTorch."""

    package = "torch"

    def __init__(self, store: JacobianStore, problem: TorchProblem, checks: StoreChecks) -> None:
        self.store, self.checks, self.same = store, checks, True
        self.torch_problem, self.source = problem, source_of(problem.inputs)
        self.network = Network(problem.module, problem.outputs, store.dtype == "float64")
        first = self.source.read(0, 1)
        with settings():
            self.n_outputs = probe_module(self.network, mapped(lambda leaf: leaf[0], first))
        self.n_examples, self.input_bytes = self.source.n_examples, self.source.bytes_held()
        self.described = [(path_of(name), tuple(value.shape)) for name, value in self.network.selected.items()]
        self.selected = [host(value) for value in self.network.selected.values()]
        self.wanted = requested(self.network, first)

    def _read(self, a: int, b: int) -> Any:
        shift = self._shift() or 0
        return self.source.read(shift + a, shift + b)

    def _example(self, n: int) -> Any:
        return mapped(lambda leaf: leaf[0], self._read(n, n + 1))

    def _plain(self, float64: bool) -> Plain:
        network = Network(self.torch_problem.module, self.torch_problem.outputs, float64)
        values = {name: value.requires_grad_() for name, value in _own(network.selected).items()}

        def row(
            example: Any, k: int, change: Callable[[Any], Any] | None = None
        ) -> tuple[np.ndarray, list[np.ndarray]]:
            given = values if change is None else _changed(values, change)

            def gradients() -> Any:
                outputs = network(given, network.tensors(example))
                return outputs, torch.autograd.grad(outputs[k], list(given.values()), allow_unused=True)

            with settings(), calling(example):
                outputs, found = network.holding(given, gradients)
            parts = [
                np.zeros(value.numel()) if g is None else host(g.to_dense() if g.is_sparse else g).reshape(-1)
                for g, value in zip(found, given.values(), strict=True)
            ]
            return host(outputs).astype(np.float64), [part.astype(np.float64) for part in parts]

        return row


def _changed(values: dict[str, torch.Tensor], change: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
    """Parameters of their types, with other numbers; those of a module are moved, its examples stay."""
    arrays = change({name: host(value) for name, value in values.items()})
    return {name: torch.as_tensor(arrays[name]).to(value).requires_grad_() for name, value in values.items()}


def _own(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that may be made to require a gradient, on the same memory."""
    return {name: value.detach() for name, value in values.items()}

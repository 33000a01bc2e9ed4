"""Compare rows and factors of a batch with plain autograd before they are stored.

One random combination of the rows of an example costs one plain backward pass. At least one example of every unit is
compared, and more of them as long as that takes a small share of the build.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from jacstore.base.limits import LIMITS
from jacstore.errors import JacstoreError
from jacstore.rows.device_pass import BatchRows
from jacstore.rows.torch.device_pass import TorchPass
from jacstore.rows.torch.hooks import Varies
from jacstore.rows.torch.network import mapped
from jacstore.terms.kinds import expand


class Differs(JacstoreError):
    """Parameters whose stored form is not their gradient at an example."""

    def __init__(self, names: set[str], example: int) -> None:
        super().__init__(f"{', '.join(sorted(names))} at example {example}")
        self.names, self.example = names, example


class Audit:
    """Compares examples of each unit, chosen at random, with plain autograd.

    Attributes
    ----------
    examples, seconds
        Number of compared examples, and the seconds that it took.
    """

    def __init__(self, passes: TorchPass) -> None:
        self.passes, self.examples, self.seconds, self.seconds_of_passes = passes, 0, 0.0, 0.0
        self._draw = np.random.default_rng()
        self._certain = -1

    def begin_unit(self, start: int, last: int) -> None:
        """Choose the example of a unit that is compared in any case."""
        self._certain = int(self._draw.integers(start, last))

    def compute(self, a: int, examples: Any, count: int) -> Any:
        """Rows of a batch that begins at example `a`, as `TorchPass.run` yields them; the last is given when compared.

        Raises
        ------
        Differs
            Naming the parameters that are wrong, and the example.
        """
        began = time.perf_counter()
        order = [n for n in self._draw.permutation(count) if a + n != self._certain]
        chosen = [self._certain - a] if a <= self._certain < a + count else []
        allowed = max(LIMITS.audit_unnoticed_seconds, LIMITS.audit_share * self.seconds_of_passes) - self.seconds
        each = self.seconds / self.examples if self.examples else allowed / LIMITS.audit_first
        chosen += order[: max(0, int(allowed / each)) if each else None]
        combined = _Combined(self.passes, chosen, self._draw)
        try:
            for rows in self.passes.run(examples):
                combined.add(rows)
                yield rows
        except Varies as error:
            raise Differs(error.names, a + error.example) from None
        self.seconds_of_passes += time.perf_counter() - began
        if chosen:
            began = time.perf_counter()
            self._compare(a, self.passes.network.tensors(examples), combined, allowed)
            self.seconds += time.perf_counter() - began

    def _compare(self, a: int, examples: Any, combined: _Combined, allowed: float) -> None:
        began = time.perf_counter()
        for at, n in enumerate(combined.chosen):
            example = mapped(lambda leaf, n=n: leaf[int(n)], examples)
            wrong = self.passes.wrong_at(example, combined.cotangents[at], combined.rows(at))
            self.examples += 1
            if wrong:
                raise Differs(wrong, a + int(n))
            if time.perf_counter() - began > allowed:
                break


class _Combined:
    """Rows of some examples of a batch, each weighted by a random cotangent and summed over outputs."""

    def __init__(self, passes: TorchPass, chosen: list[int], draw: np.random.Generator) -> None:
        self.passes, self.chosen = passes, chosen
        self.cotangents = draw.standard_normal((len(chosen), passes.n_outputs)).astype(np.float32)
        self._dense: list[np.ndarray] = []
        self._factors: dict[str, np.ndarray] = {}

    def add(self, rows: BatchRows) -> None:
        """Take in a slice of outputs."""
        if not self.chosen:
            return
        u = self.cotangents[:, rows.first_output : rows.first_output + rows.norms.shape[1]]
        dense = [self._weighted(u, values) for values in rows.rows]
        self._dense = [a + b for a, b in zip(self._dense, dense, strict=True)] if self._dense else dense
        per_output = {operand.name for operand in self.passes.cut.operands if operand.per_output}
        for name, values in rows.factors.items():
            if name not in per_output:
                self._factors[name] = values[self.chosen]
                continue
            part = self._weighted(u, values)
            self._factors[name] = self._factors[name] + part if name in self._factors else part

    def _weighted(self, u: np.ndarray, values: np.ndarray) -> np.ndarray:
        wide = values[self.chosen]
        u = u.astype(np.promote_types(wide.dtype, np.float32))
        summed = np.matmul(u[:, None], wide.reshape(*wide.shape[:2], -1))
        return summed.reshape(len(wide), 1, *wide.shape[2:])

    def rows(self, at: int) -> dict[str, np.ndarray]:
        """Weighted rows `(1, size)` of one of the chosen examples, by name."""
        found, dense = {}, iter(self._dense)
        for name, leaf in zip(self.passes.network.selected, self.passes.cut.leaves, strict=True):
            if leaf.dense:
                row = next(dense)[at]
            else:
                row = expand(leaf.terms, {o: self._factors[o][at : at + 1] for o in leaf.operands}, leaf.size)[0]
            found[name] = row.reshape(1, -1).astype(np.float64)
        return found

"""A product of layer inputs and cotangents: weights of linear layers, and biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from jacstore.terms.term import Factored, Operands, Shapes, Views, positions_first


@dataclass(frozen=True, kw_only=True)
class Dot(Factored):
    """A product of layer inputs `(n, G, T, C)` and cotangents; without inputs, the sum of cotangents over positions.

    Its block is `(n, K, G, C, D)`, C = 1 without inputs.
    """

    kind: ClassVar[str] = "dot"
    inputs: str | None
    cotangents: str
    scale: float
    views: Views

    @property
    def source(self) -> str | None:
        return self.inputs

    def renamed(self, names: Mapping[str, str]) -> Self:
        inputs = None if self.inputs is None else names[self.inputs]
        return self.changed(inputs=inputs, cotangents=names[self.cotangents])

    def block(self, operands: Operands, xp: Any = np) -> Any:
        d = operands[self.cotangents]
        if self.inputs is None:
            return d.sum(-2, keepdims=True)
        a = operands[self.inputs]
        return xp.matmul(xp.swapaxes(a, -1, -2)[:, None], d)

    def rows_in_torch(self, operands: Operands, torch: Any) -> Any:
        d = operands[self.cotangents][:, :, 0]
        n, k, t, width = d.shape
        if self.inputs is None:
            return d.sum(2)
        columns = d.transpose(1, 2).reshape(n, t, k * width)
        block = operands[self.inputs][:, 0].transpose(1, 2) @ columns
        order = (0, 2, 3, 1) if self.views else (0, 2, 1, 3)
        return block.unflatten(2, (k, width)).permute(*order).reshape(n, k, -1)

    def input_columns(self, operands: Operands) -> int | None:
        return None if self.inputs is None or operands[self.inputs].shape[1] > 1 else operands[self.inputs].shape[-1]

    def some_inputs(self, operands: Operands, first: int, last: int) -> Any:
        assert self.inputs is not None
        return operands[self.inputs][:, 0, :, first:last]

    def inside(self, other: Self, left: Operands, right: Operands, group: int, xp: Any) -> Any:
        if self.inputs is None or other.inputs is None:
            return None
        a, b = left[self.inputs][:, group], right[other.inputs][:, group]
        return positions_first(a.transpose(1, 0, 2), b.transpose(1, 0, 2), xp)

    def own_inside(self, other: Self, operands: Operands, group: int, xp: Any) -> Any:
        if self.inputs is None or other.inputs is None:
            return None
        a, b = operands[self.inputs][:, group], operands[other.inputs][:, group]
        return xp.matmul(a, xp.swapaxes(b, -1, -2))

    def inside_flops(self, other: Self, shapes: Shapes, elementwise: int) -> int | None:
        if self.inputs is None or other.inputs is None:
            return None
        groups, t, _ = shapes[self.cotangents]
        return 2 * groups * t * shapes[other.cotangents][1] * shapes[self.inputs][-1]

    @property
    def is_simple(self) -> bool:
        return True

    def summed_row(self, operands: Operands, d: np.ndarray) -> np.ndarray:
        if self.inputs is None:
            return np.asarray(d.sum((0, 2)).reshape(-1))
        a = operands[self.inputs]
        flat = [np.ascontiguousarray(x.transpose(1, 0, 2, 3)).reshape(x.shape[1], -1, x.shape[3]) for x in (a, d)]
        return np.matmul(flat[0].transpose(0, 2, 1), flat[1]).reshape(-1)

    def met(self, operands: Operands, matrix: np.ndarray, d: np.ndarray) -> np.ndarray:
        groups, width = d.shape[2], d.shape[4]
        matrix = matrix.reshape(groups, -1, width)
        if self.inputs is None:
            return np.broadcast_to(matrix[None], (len(d), groups, d.shape[3], width))
        met: np.ndarray = np.matmul(operands[self.inputs], matrix[None])
        return met

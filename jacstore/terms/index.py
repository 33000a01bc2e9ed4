"""Rows looked up in a table: embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from scipy import sparse

from jacstore.terms.term import Factored, Operands, Shapes, Views


@dataclass(frozen=True, kw_only=True)
class Index(Factored):
    """Rows looked up in a table: `ids` `(n, T)`, -1 for none, and cotangents; its block is `(n, K, size, D)`."""

    kind: ClassVar[str] = "index"
    sparse: ClassVar[bool] = True
    ids: str
    cotangents: str
    scale: float
    views: Views
    size: int

    @classmethod
    def of(cls, inputs: str | None, geometry: Mapping[str, Any], **common: Any) -> Self:
        return cls(ids=str(inputs), **common, **geometry)

    @property
    def source(self) -> str | None:
        return self.ids

    def renamed(self, names: Mapping[str, str]) -> Self:
        return self.changed(ids=names[self.ids], cotangents=names[self.cotangents])

    def block(self, operands: Operands, xp: Any = np) -> Any:
        ids, d = operands[self.ids], operands[self.cotangents][:, :, 0]
        hot = (ids[:, :, None] == xp.arange(self.size)).astype(d.dtype)
        return xp.matmul(xp.swapaxes(hot, -1, -2)[:, None], d)

    def rows_in_torch(self, operands: Operands, torch: Any) -> Any:
        d = operands[self.cotangents][:, :, 0]
        n, k, t, width = d.shape
        columns = d.transpose(1, 2).reshape(n, t, k * width)
        ids = operands[self.ids].long()
        # Row `size` takes what belongs to no row of the table.
        ids = torch.where(ids < 0, self.size, ids)[:, :, None].expand(-1, -1, k * width)
        rows = d.new_zeros(n, self.size + 1, k * width).scatter_add(1, ids, columns)[:, :-1]
        return rows.unflatten(2, (k, width)).transpose(1, 2).reshape(n, k, -1)

    def inside(self, other: Self, left: Operands, right: Operands, group: int, xp: Any) -> Any:
        a, b = left[self.ids].T, right[other.ids].T
        same = (a[:, None, :, None] == b[None, :, None, :]) & (a >= 0)[:, None, :, None]
        return same.astype(left[self.cotangents].dtype)

    def own_inside(self, other: Self, operands: Operands, group: int, xp: Any) -> Any:
        a, b = operands[self.ids], operands[other.ids]
        return ((a[:, :, None] == b[:, None, :]) & (a >= 0)[:, :, None]).astype(operands[self.cotangents].dtype)

    def inside_flops(self, other: Self, shapes: Shapes, elementwise: int) -> int | None:
        return elementwise * shapes[self.cotangents][1] * shapes[other.cotangents][1]

    def matrix_form(self, shapes: Shapes) -> tuple[tuple[int, int, int], Views]:
        groups, _, width = shapes[self.cotangents]
        return (groups, self.size, width), self.views

    def through(
        self, operands: Operands, at: slice, matrices: np.ndarray, shape: tuple[int, int, int], positions: int
    ) -> np.ndarray:
        ids = operands[self.ids][at]
        found = matrices[0][np.where(ids >= 0, ids, 0)]
        found[ids < 0] = 0
        return np.asarray(found.reshape(len(ids), positions * shape[2], -1))

    def add_weighted(
        self, operands: Operands, at: slice, weighted: np.ndarray, shape: tuple[int, int, int], total: np.ndarray
    ) -> None:
        _scatter(operands[self.ids][at], weighted.reshape(-1, weighted.shape[-1]), total[0])

    def summed_row(self, operands: Operands, d: np.ndarray) -> np.ndarray:
        ids, table = operands[self.ids], np.zeros((self.size, d.shape[-1]))
        np.add.at(table, ids[ids >= 0], d[:, 0][ids >= 0])
        return table.reshape(-1)

    def met(self, operands: Operands, matrix: np.ndarray, d: np.ndarray) -> np.ndarray:
        ids = operands[self.ids]
        looked = matrix.reshape(-1, d.shape[4])[np.where(ids >= 0, ids, 0)] * (ids >= 0)[..., None]
        return np.asarray(looked[:, None])


def _scatter(ids: np.ndarray, values: np.ndarray, total: np.ndarray) -> None:
    """Add values `(count, w)` to the rows of `total` `(size, w)` that `ids` name; -1 names none."""
    flat = ids.reshape(-1)
    kept = np.flatnonzero(flat >= 0)
    rows, inverse = np.unique(flat[kept], return_inverse=True)
    if not len(rows):
        return
    hot = sparse.csr_array((np.ones(len(kept), values.dtype), (inverse, kept)), shape=(len(rows), len(flat)))
    total[rows] += hot @ values

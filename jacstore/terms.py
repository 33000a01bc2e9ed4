"""In: a parameter leaf. Out: the terms whose sum is its part of every row, and what they store.

Floor for all storage forms. `Dense` is the row itself; a factored form adds a class with the same methods and a line in
`TERMS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from jacstore.errors import Damaged


class Term(Protocol):
    """One summand of a leaf's part of the row."""

    kind: ClassVar[str]

    def numbers(self, n_outputs: int) -> int:
        """Numbers stored per example."""

    def arrays(self) -> dict[str, tuple[int, int]]:
        """Stored arrays it reads, each with its range of columns."""

    def expand(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Rows `(n, K, size)` from what is stored."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""


@dataclass(frozen=True, kw_only=True)
class Dense:
    """The row itself: columns `start` to `start + size` of the array `rows` `(N, K, P_dense)`."""

    kind: ClassVar[str] = "dense"
    start: int
    size: int

    def numbers(self, n_outputs: int) -> int:
        return n_outputs * self.size

    def arrays(self) -> dict[str, tuple[int, int]]:
        return {"rows": (self.start, self.start + self.size)}

    def expand(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        return arrays["rows"]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}


TERMS: dict[str, type[Dense]] = {Dense.kind: Dense}


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One selected parameter array: its place in the row is columns `offset` to `offset + size`."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    terms: tuple[Term, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "path": self.path,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "offset": self.offset,
            "terms": [term.to_dict() for term in self.terms],
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Leaf:
        """From JSON."""
        terms = []
        for fields in given["terms"]:
            if fields.get("kind") not in TERMS:
                raise Damaged(f"leaf {given['path']}: unknown term {fields.get('kind')!r}; known are {sorted(TERMS)}")
            terms.append(TERMS[fields["kind"]](**{k: v for k, v in fields.items() if k != "kind"}))
        shape = tuple(given["shape"])
        return cls(path=given["path"], shape=shape, dtype=given["dtype"], offset=given["offset"], terms=tuple(terms))


def dense_leaves(described: list[tuple[str, tuple[int, ...], str]]) -> tuple[Leaf, ...]:
    """Leaves stored as rows, side by side in the order given: path, shape and dtype of each."""
    leaves, offset = [], 0
    for path, shape, dtype in described:
        size = math.prod(shape)
        term = Dense(start=offset, size=size)
        leaves.append(Leaf(path=path, shape=tuple(shape), dtype=dtype, offset=offset, terms=(term,)))
        offset += size
    return tuple(leaves)

"""Describe a parameter leaf by the terms whose sum is its part of every row, and form rows from what they store.

`Term` names every kind, each a class in a file of its own; JSON tells them apart by their `kind`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jacstore.terms.conv import Conv
from jacstore.terms.dense import Dense
from jacstore.terms.dot import Dot
from jacstore.terms.gain import Gain
from jacstore.terms.index import Index
from jacstore.terms.term import Constant, Factored, Operand, Views

__all__ = ["KINDS", "Constant", "Conv", "Dense", "Dot", "Factored", "Gain", "Index", "Leaf", "Operand", "Term", "Views"]
__all__ += ["dense_leaves", "expand"]

# The kinds that are stored by factors, by their name in JSON.
KINDS: dict[str, type[Factored]] = {kind.kind: kind for kind in (Dot, Conv, Index, Gain)}
if TYPE_CHECKING:
    Term = Dense | Factored
else:
    # What JSON may hold.
    Term = Dense | Dot | Conv | Index | Gain


def expand(terms: Sequence[Term], operands: Mapping[str, Any], size: int, xp: Any = np) -> Any:
    """A factored leaf's part of rows, `(n, K, size)`, from its operands `(n, ...)` and `(n, K, ...)`."""
    total = None
    for term in terms:
        assert not isinstance(term, Dense)
        part = term.rows(operands, size, xp)
        total = part if total is None else total + part
    return total


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One selected parameter array: its place in the row is columns `offset` to `offset + size`."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    terms: tuple[Term, ...]
    why: str = ""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dense(self) -> Dense | None:
        """Its place among stored rows, if it is stored as rows."""
        return self.terms[0] if isinstance(self.terms[0], Dense) else None

    @property
    def factored(self) -> tuple[Factored, ...]:
        """Its terms, if it is stored by factors."""
        return tuple(term for term in self.terms if not isinstance(term, Dense))

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands it is made of."""
        return tuple(dict.fromkeys(name for term in self.terms for name in term.operands))

    @property
    def constants(self) -> tuple[Constant, ...]:
        """Arrays that no example changes, each once."""
        return tuple(dict.fromkeys(constant for term in self.factored for constant in term.fixed))

    def with_constants(self, change: Callable[[Constant], Constant]) -> Leaf:
        """The same leaf with every constant changed."""
        if not self.constants:
            return self
        return replace(self, terms=tuple(term.with_constants(change) for term in self.factored))

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "path": self.path,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "offset": self.offset,
            "terms": [term.to_dict() for term in self.terms],
            "why": self.why,
        }


def dense_leaves(described: list[tuple[str, tuple[int, ...], str]]) -> tuple[Leaf, ...]:
    """Leaves stored as rows, side by side in the order given: path, shape and dtype of each."""
    leaves, offset = [], 0
    for path, shape, dtype in described:
        size = math.prod(shape)
        term = Dense(start=offset, size=size)
        leaves.append(Leaf(path=path, shape=tuple(shape), dtype=dtype, offset=offset, terms=(term,)))
        offset += size
    return tuple(leaves)

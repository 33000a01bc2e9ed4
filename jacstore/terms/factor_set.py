"""Products of factored leaves: what was read of them for a range of examples, and their parts of the kernel.

Leaves that are one product of one input and one cotangent are brought together first: those that share cotangents, such
as a weight and its bias, are one product of joined inputs, and nothing is computed twice.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jacstore.base.modes import Mode
from jacstore.terms.kinds import Leaf
from jacstore.terms.row_products import own_products, products
from jacstore.terms.term import Factored


class FactorSet:
    """Factors of some leaves for consecutive examples.

    Parameters
    ----------
    leaves
        Factored leaves that are contracted implicitly.
    operands
        Their operands `(n, ...)`, in the type of the products.
    """

    def __init__(self, leaves: Sequence[Leaf], operands: Mapping[str, np.ndarray]) -> None:
        joined: dict[str, list[Factored]] = {}
        summed: list[Factored] = []
        self.others: list[Leaf] = []
        for leaf in leaves:
            term = leaf.factored[0]
            if len(leaf.terms) == 1 and term.is_simple and operands[term.cotangents].shape[2:4] == (1, 1):
                joined.setdefault(term.cotangents, []).append(term)
            elif len(leaf.terms) == 1 and term.is_simple and term.source is None:
                summed.append(term)
            else:
                self.others.append(leaf)
        self.n_examples = len(next(iter(operands.values())))
        # (inputs (n, C), cotangents (n, K, D)) with all scales in the inputs
        self.simple = [(self._joined(terms, operands), _flat_outputs(operands[name])) for name, terms in joined.items()]
        # Biases: their cotangents are summed over positions once, not for every block of pairs.
        self.simple += [(self._joined([term], operands), _summed(operands[term.cotangents])) for term in summed]
        names = {name for leaf in self.others for name in leaf.operands}
        self.operands = {name: operands[name] for name in names}
        cotangents = {term.cotangents for leaf in leaves for term in leaf.factored}
        self.n_outputs = operands[min(cotangents)].shape[1]
        # Positions, or pixels, whose products are formed in pairs.
        self.positions = max(
            (math.prod(o.shape[2 if name in cotangents else 1 : -1]) for name, o in self.operands.items()), default=1
        )

    def _joined(self, terms: list[Factored], operands: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Inputs of leaves that share cotangents side by side; None for a lone bias."""
        if len(terms) == 1 and terms[0].source is None and terms[0].scale == 1:
            return None
        parts = []
        for term in terms:
            dtype = operands[term.cotangents].dtype
            part = np.ones((self.n_examples, 1), dtype) if term.source is None else operands[term.source][:, 0, 0]
            parts.append(part if term.scale == 1 else part * dtype.type(term.scale))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, -1)

    def block_examples(self, numbers: int) -> int:
        """Examples a side of a block whose products of pairs are about `numbers` numbers."""
        side = math.isqrt(numbers)
        return max(1, side // (self.n_outputs * (self.positions if self.others else 1)))

    def block(self, numbers: int) -> tuple[int, int]:
        """Examples down and along of a block for a core's cache, whose products are about `numbers` numbers.

        A lone position's products are plain matrix products: they are fastest, and summed fastest, in wide strips of
        twice as many numbers.
        """
        if self.others:
            # Products with sums over positions go in runs of the examples along.
            side = self.block_examples(numbers // 4)
            return side, max(1, numbers // (side * (self.n_outputs * self.positions) ** 2))
        side = self.block_examples(2 * numbers)
        return max(1, side // 2), 2 * side

    def on_device(self, put: Callable[[np.ndarray], Any]) -> FactorSet:
        """The same factors where `put` brings arrays."""
        moved = copy.copy(self)
        moved.simple = [(None if a is None else put(a), put(d)) for a, d in self.simple]
        moved.operands = {name: put(values) for name, values in self.operands.items()}
        return moved

    def parts(
        self,
        mode: Mode,
        left: slice,
        other: FactorSet,
        right: slice,
        xp: Any = np,
        matmul: Callable[[int, Any, Any], Any] | None = None,
    ) -> Iterator[Any]:
        """Products of examples `left` with examples `right` of `other`, leaf by leaf, in the form of `Mode.view`.

        `matmul` multiplies two matrices into buffer 0 or 1; what is yielded is then good until the next part.
        """
        matmul = matmul or (lambda _, x, y: xp.matmul(x, y))
        for (a, d), (b, e) in zip(self.simple, other.simple, strict=True):
            along = _along(mode, d[left], e[right], matmul)
            if a is not None and b is not None:
                inside = matmul(1, a[left], b[right].T)
                along *= inside[:, None, :, None] if along.ndim == 4 else inside
            yield along
        mine = {name: values[left] for name, values in self.operands.items()}
        others = {name: values[right] for name, values in other.operands.items()}
        across: dict[Any, Any] = {}
        for leaf in self.others:
            part = products(leaf, mine, others, mode, xp, across)
            yield part[:, 0, :, 0] if mode.sums_outputs else part

    def own_parts(self, rows: slice, xp: Any = np) -> Iterator[Any]:
        """Products of each example with itself, `(n, K, K)`, leaf by leaf."""
        for a, d in self.simple:
            own = xp.matmul(d[rows], d[rows].transpose(0, 2, 1))
            yield own if a is None else own * xp.square(a[rows]).sum(-1)[:, None, None]
        mine = {name: values[rows] for name, values in self.operands.items()}
        for leaf in self.others:
            yield own_products(leaf, mine, xp)


def _flat_outputs(cotangents: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(cotangents[:, :, 0, 0])


def _summed(cotangents: np.ndarray) -> np.ndarray:
    """Sums over positions of all groups, `(n, K, G * D)`."""
    return cotangents.sum(3).reshape(*cotangents.shape[:2], -1)


def _along(mode: Mode, d: Any, e: Any, matmul: Callable[[int, Any, Any], Any]) -> Any:
    """Products of cotangents `(n, K, D)`: `(n, K, m, K)`, the trace `(n, m)`, or `(K, n, m)`."""
    (n, k, width), m = d.shape, len(e)
    if mode.crosses_outputs:
        return matmul(0, d.reshape(n * k, width), e.reshape(m * k, width).T).reshape(n, k, m, k)
    if mode.sums_outputs:
        return matmul(0, d.reshape(n, k * width), e.reshape(m, k * width).T)
    return matmul(0, d.transpose(1, 0, 2), e.transpose(1, 2, 0))

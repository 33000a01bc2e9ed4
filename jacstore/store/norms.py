"""Squared norms of rows from the stored numbers, and how far they may be from the exact ones.

The exact norms were taken on the device, before rows were rounded for storage. The diagonal of a kernel is compared
with them when it is assembled, and again by `verify`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from jacstore.base.budget import NORMS, Budget
from jacstore.base.precision import LOST, ROUNDOFF, compute_dtype, norm_bound
from jacstore.store.reader import JacobianStore
from jacstore.terms.kinds import Leaf, expand
from jacstore.terms.rounding import lost_to_underflow, squared_magnitudes
from jacstore.terms.row_products import squared_norms

# Columns of a single row that are read at once.
AT_ONCE = 100_000


def leaf_row(store: JacobianStore, leaf: Leaf, n: int, k: int) -> np.ndarray:
    """One row of one leaf in float64, `(size,)`, computed from the stored numbers."""
    if leaf.dense:
        row = np.empty(leaf.size)
        for a in range(0, leaf.size, AT_ONCE):
            b = min(a + AT_ONCE, leaf.size)
            some = np.empty((1, store.n_outputs, b - a))
            store.read("rows", n, n + 1, leaf.dense.start + a, leaf.dense.start + b, some)
            row[a:b] = some[0, k]
        return row
    operands = {name: store.read_operand(name, n, n + 1, np.float64) for name in leaf.operands}
    for term in leaf.factored:
        if operands[term.cotangents].shape[1] > 1:
            operands[term.cotangents] = operands[term.cotangents][:, k : k + 1]
    made: np.ndarray = expand(leaf.terms, operands, leaf.size)[0, 0]
    return made


def stored_norms(store: JacobianStore, leaf: Leaf, start: int, stop: int, memory: int) -> np.ndarray:
    """Squared norms `(n, K)` of one leaf's rows in float64, from the stored numbers, within `memory`."""
    budget = Budget(memory).split(**NORMS)
    total = np.zeros((stop - start, store.n_outputs))
    if leaf.dense:
        width = max(1, budget["rows"] // (8 * total.size))
        first, last = leaf.dense.start, leaf.dense.start + leaf.size
        for a in range(first, last, width):
            rows = np.empty((*total.shape, min(a + width, last) - a))
            store.read("rows", start, stop, a, a + rows.shape[2], rows)
            total += np.einsum("nkp,nkp->nk", rows, rows)
        return total
    if not leaf.size:
        return total
    operands = {name: store.read_operand(name, start, stop, np.float64) for name in leaf.operands}
    step = max(1, budget["pairs"] // _pair_bytes(store, leaf))
    for a in range(0, stop - start, step):
        total[a : a + step] = squared_norms(leaf, {k: operands[k][a : a + step] for k in leaf.operands}).sum(-1)
    return total


def _pair_bytes(store: JacobianStore, leaf: Leaf) -> int:
    """Bytes that products of one example's factors, or its rows, take in float64."""
    rows = 3 * store.n_outputs * leaf.size
    used = {operand.name: operand for operand in store.operands if operand.name in leaf.operands}
    numbers = sum(operand.numbers(store.n_outputs) for operand in used.values())
    shapes = {name: operand.shape for name, operand in used.items()}
    pairs = 0
    for term in leaf.factored:
        t = shapes[term.cotangents][1]
        pairs += 3 * (store.n_outputs * t * t + term.pair_numbers(shapes)) * len(leaf.terms)
    return 8 * (rows + 2 * numbers + pairs)


def allowance(store: JacobianStore, leaf: Leaf, n: int, k: int, more: float = 0.0) -> float:
    """How far the squared norm of one leaf's row may be from the exact one, from the terms that the row is summed from.

    `more` is a further relative error, of products that form a kernel's diagonal.
    """
    if not leaf.size:
        return 0.0
    operands = {name: store.read_operand(name, n, n + 1, np.float64) for name in leaf.operands}
    if leaf.dense:
        size = float(np.linalg.norm(leaf_row(store, leaf, n, k)))
    else:
        size = math.sqrt(squared_magnitudes(leaf, operands)[0, k])
    lost = lost_to_underflow(leaf, operands, k, store.dtype) + math.sqrt(leaf.size) * LOST[compute_dtype(store.dtype)]
    bound = norm_bound(store.dtype, store.lowest, not leaf.dense) + more
    return bound * size**2 * (1 + 4 * ROUNDOFF[store.dtype]) + 2 * lost * size + lost**2


def largest_difference(
    found: np.ndarray, exact: np.ndarray, bound: float, allowed: Callable[[tuple[int, ...]], float]
) -> tuple[float, float, tuple[int, ...] | None]:
    """The largest relative difference of squared norms, its bound, and the first place out of bound, or None.

    `allowed` gives the acceptable absolute difference at a place beyond `bound`, infinite where numbers are known to be
    NaN or infinite: sums that cancel keep the rounding of their terms, so a place may exceed the common bound.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        off = np.where(found == exact, 0.0, np.abs(found - exact))
        scale = np.maximum(np.maximum(np.abs(exact), np.abs(found)), np.finfo(float).tiny)
        relative = off / scale
    figure = slack = 0.0
    limit = bound
    for entry in np.argwhere(~(relative <= bound)):
        at = tuple(int(x) for x in entry)
        most = allowed(at)
        if not (off[at] <= most or most == math.inf):
            return float(relative[at]), float(most / scale[at]), at
        if most < math.inf and relative[at] * scale[at] / most > slack:
            figure, limit, slack = float(relative[at]), float(most / scale[at]), float(off[at] / most)
        relative[at] = 0.0
    largest = float(relative.max(initial=0.0))
    return (largest, bound, None) if largest / bound >= slack else (figure, limit, None)

"""Measure what rounding the stored numbers of an example does to kernel entries, by rounding them once more.

A kernel entry is a sum of many rounded products, so its error is far below the worst case and depends on how many
numbers share the sum. Rounding them anew, scaled so that they fall elsewhere between two floats, shows it for any
term: equal numbers are rounded alike, as they were, and factors pass their error on to all they are multiplied with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jacstore.base.precision import LOST
from jacstore.terms.kinds import Leaf
from jacstore.terms.row_products import squared_norms

# Rounding to so few digits that float64 shows it, and enough that its square does not matter.
BITS = 12
DRAWS = 4
# As many numbers as a core keeps close.
COLUMNS_AT_ONCE = 32_768


def observed_rounding(
    leaves: Sequence[Leaf], rows: np.ndarray | None, operands: Mapping[str, np.ndarray], norms: np.ndarray, seed: int
) -> dict[str, float] | None:
    """`gain`, `amplification` and `measured` of the rows of one example; None if a row is zero or not finite.

    Parameters
    ----------
    rows
        What is stored as rows, `(K, columns)`.
    operands
        What is stored of factored leaves, `(1, ...)`.
    norms
        Squared norms `(K,)` taken before rounding.

    Returns
    -------
    dict
        `gain`: standard deviation of a diagonal entry's relative error, in units of the roundoff; those beside the
        diagonal have a smaller one. `amplification`: squared norm of what a row is summed from, relative to its own.
        `measured`: the largest relative difference from `norms`.
    """
    factored = [leaf for leaf in leaves if not leaf.dense and leaf.size]
    stored = _squares(factored, rows, operands, None)
    if not (np.isfinite(stored).all() and np.isfinite(norms).all() and stored.all() and norms.all()):
        return None
    draw = np.random.default_rng(seed)
    scales = draw.uniform(1, 2, DRAWS)
    changes = [(_squares(factored, rows, operands, scale) - stored) / stored for scale in scales]
    plain = stored - sum((squared_norms(leaf, operands).sum(-1)[0] for leaf in factored), np.zeros_like(stored))
    summed = plain + sum((squared_magnitudes(leaf, operands)[0] for leaf in factored), np.zeros_like(stored))
    figures = {
        "gain": np.sqrt(np.mean(np.square(changes))) * 2**BITS,
        "amplification": max(1.0, float((summed / stored).max())),
        "measured": (np.abs(stored - norms) / norms).max(),
    }
    return {name: float(f"{float(value):.4g}") for name, value in figures.items()}


def _squares(
    factored: Sequence[Leaf], rows: np.ndarray | None, operands: Mapping[str, np.ndarray], scale: float | None
) -> Any:
    """Squared norms `(K,)`, of numbers rounded anew if a scale is given."""
    total: Any = 0.0
    if rows is not None:
        for a in range(0, rows.shape[1], COLUMNS_AT_ONCE):
            some = _rounded(rows[:, a : a + COLUMNS_AT_ONCE].astype(np.float64), scale)
            total = total + np.einsum("kp,kp->k", some, some)
    again = {name: v if v.dtype.kind == "i" else _rounded(v, scale) for name, v in operands.items()}
    for leaf in factored:
        total = total + squared_norms(leaf, again).sum(-1)[0]
    return total


def _rounded(values: np.ndarray, scale: float | None) -> np.ndarray:
    """To `BITS` significant bits, unit roundoff `2**-BITS`, after scaling and before scaling back."""
    if scale is None:
        return values
    rounded: np.ndarray = values * scale
    # Half of what is left out is added before it is cut off; a carry moves into the exponent, as it should.
    cut = np.uint64(53 - BITS)
    bits = rounded.view(np.uint64)
    bits += np.uint64(1) << (cut - np.uint64(1))
    bits &= ~((np.uint64(1) << cut) - np.uint64(1))
    rounded /= scale
    return rounded


def squared_magnitudes(leaf: Leaf, operands: Mapping[str, np.ndarray]) -> np.ndarray:
    """Squared norms `(n, K)` of what a factored leaf's rows are summed from: of absolute values."""
    given = {name: operands[name] for name in leaf.operands}
    wide = {k: v if v.dtype.kind == "i" else np.abs(v.astype(np.float64)) for k, v in given.items()}
    terms = tuple(term.magnitudes() for term in leaf.factored)
    norms: np.ndarray = squared_norms(replace(leaf, terms=terms), wide).sum(-1)
    return norms


def lost_to_underflow(leaf: Leaf, operands: Mapping[str, np.ndarray], k: int, storage: str) -> float:
    """Norm of what one row may have lost because its numbers are too small for the stored type."""
    if leaf.dense:
        return math.sqrt(leaf.size) * LOST[storage]
    return sum(term.lost(operands, k, storage) for term in leaf.factored)

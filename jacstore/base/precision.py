"""Bounds on the errors of rows, norms and kernel entries, from the types that they were computed and stored in.

Errors of rows are relative to the numbers that the row is summed from, `|a| ⊗ |d|` for factors, since a sum that
cancels keeps the rounding of its terms. Errors of kernel entries are relative to `sqrt(G_ii G_jj)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jacstore.base.limits import LIMITS

# Unit roundoff: the largest relative error of rounding to nearest.
ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    # Two or three bfloat16 numbers stand for one of float32. The leading 3, 6 or 9 of their products are summed: those
    # that are left out count as if both factors were rounded more coarsely.
    "bf16x9": 2.0**-24,
    "bf16x6": 2.0**-23,
    "bf16x3": 2.0**-16,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8": 2.0**-3,
}
# What rounding may lose of a number, however small it is: devices flush numbers below the normal ones to zero.
LOST = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-25, "bfloat16": 2.0**-126}
# How many roundings of the lowest type in a function, and how many of the type that sums are formed in, may add up in a
# row: a forward and a backward pass through tens of layers.
LOWEST_ROUNDINGS, SUM_ROUNDINGS = 32, 256
# Of so many roundings of a row's sums, one in so many moves a kernel entry to the same side.
ROUNDINGS_ALIKE = 16
# Sums of squares are formed over this many numbers before they are float64.
NORM_RUN = 64
SIGMAS = 6
# Numbers that are summed one after the other in the type of the products: a block of BLAS, a whole slab of a device.
SUM_DEPTH = {"blas": 384, "xla": 4096}


def compute_dtype(storage: str) -> str:
    """The type that sums of a build are formed in."""
    return "float64" if storage == "float64" else "float32"


def row_bound(storage: str, lowest: str) -> float:
    """Bound on the relative error of a row against float64; `lowest` is the lowest precision in the function."""
    # Both factors of a product are rounded.
    return computed_bound(storage, lowest) + 2 * ROUNDOFF[storage]


def computed_bound(storage: str, lowest: str) -> float:
    """The same bound before rows are rounded to the stored type."""
    computed = SUM_ROUNDINGS * ROUNDOFF[compute_dtype(storage)]
    if lowest != compute_dtype(storage):
        computed += LOWEST_ROUNDINGS * ROUNDOFF[lowest]
    return computed


def norm_bound(storage: str, lowest: str, factored: bool) -> float:
    """Relative difference between a squared norm taken before rounding and that of the stored numbers."""
    bound = NORM_RUN * ROUNDOFF[compute_dtype(storage)] + (4 if factored else 2) * ROUNDOFF[storage]
    if factored and ROUNDOFF[lowest] > ROUNDOFF["float32"]:
        # Products of factors are formed in the factors' own type.
        bound += 8 * ROUNDOFF[lowest]
    return bound


def product_bound(precision: str, engine: str, n_columns: int) -> float:
    """Error of a kernel entry from products and sums alone, without the rounding of rows to a lower type.

    A product is summed in its own type over some columns; the roundings of a long sum behave like random numbers.
    """
    unit, depth = _unit_and_depth(precision, engine, n_columns)
    return unit * (8 + 2 * math.sqrt(depth))


def squares_bound(precision: str, engine: str, n_columns: int) -> float:
    """The same for a kernel's diagonal: sums of squares only grow, so that their roundings may all be to one side."""
    unit, depth = _unit_and_depth(precision, engine, n_columns)
    return unit * (8 + depth)


def _unit_and_depth(precision: str, engine: str, n_columns: int) -> tuple[float, int]:
    """Roundoff of products and how many of them are summed one after the other in their own type."""
    depth = SUM_DEPTH[engine] if precision != "float64" else max(SUM_DEPTH[engine], n_columns // LIMITS.slab_columns)
    return ROUNDOFF["float64" if precision == "float64" else "float32"], min(depth, max(n_columns, 1))


def rounding_error(dtype: str, rounding: Mapping[str, Any]) -> tuple[float, float]:
    """Error of a kernel entry from rounding stored numbers: `SIGMAS` standard deviations, and the worst case.

    `rounding` holds what was observed in some of the store's rows: `gain`, the standard deviation in units of the
    roundoff, and `amplification`, the squared magnitude of the terms of a row against its squared norm.
    """
    worst = 4 * ROUNDOFF[dtype] * rounding["amplification"]
    gain = rounding.get("gain")
    return (worst if gain is None else min(worst, SIGMAS * gain * ROUNDOFF[dtype])), worst


def stored_error(storage: str, lowest: str, rounding: Mapping[str, Any]) -> tuple[float, float]:
    """Error of a kernel entry from computing rows, in a function of `lowest` precision, and storing them; see above."""
    computed = SUM_ROUNDINGS * ROUNDOFF[compute_dtype(storage)]
    likely, worst = rounding_error(storage, rounding)
    likely, worst = likely + computed / ROUNDINGS_ALIKE, worst + 2 * computed
    if lowest != compute_dtype(storage):
        lower, lowest_worst = rounding_error(lowest, rounding)
        likely, worst = likely + lower * math.sqrt(LOWEST_ROUNDINGS), worst + lowest_worst * LOWEST_ROUNDINGS
    return likely, worst


def entry_error(
    storage: str,
    lowest: str,
    rounding: Mapping[str, Any],
    precision: str,
    engine: str,
    rounded_to: str | None,
    n_columns: int,
) -> tuple[float, float]:
    """Error of an entry against exact rows, relative to `sqrt(G_ii G_jj)`: `SIGMAS` deviations, and the worst case.

    It adds up from computing rows, rounding them to the stored type, rounding them once more where products are fast,
    and forming products and sums.
    """
    parts = [stored_error(storage, lowest, rounding)]
    if rounded_to:
        parts.append(rounding_error(rounded_to, rounding))
    product = product_bound(precision, engine, n_columns) * rounding["amplification"]
    parts.append((product, product * math.sqrt(n_columns)))
    return sum(likely for likely, _ in parts), sum(worst for _, worst in parts)

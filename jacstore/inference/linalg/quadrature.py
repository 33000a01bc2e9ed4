"""Shifts and weights of a quadrature for inverse square roots of positive definite matrices.

`M^{-1/2} v ≈ sum_q w_q (M + s_q I)⁻¹ v` for `M` with eigenvalues in `[lmin, lmax]` (contour integral quadrature).

References
----------
Hale, Higham, Trefethen 2008, doi:10.1137/070700607. Pleiss, Jankowiak, Eriksson, Damle, Gardner 2020, arXiv:2006.11267.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ellipj, ellipk, ellipkm1

from jacstore.errors import InvalidRequestError

LARGEST_Q = 200


@dataclass(frozen=True, kw_only=True)
class Quadrature:
    """Shifts and weights `(Q,)` for eigenvalues between `smallest` and `largest`."""

    smallest: float
    largest: float
    shifts: np.ndarray
    weights: np.ndarray

    @property
    def error(self) -> float:
        """The expected largest relative error of the inverse root of an eigenvalue."""
        return 4 * math.exp(-2 * math.pi**2 * len(self.shifts) / (_log_condition(self.smallest, self.largest) + 3))

    def inverse_root(self, values: np.ndarray) -> np.ndarray:
        """The approximation of `values^{-1/2}`, in the shape of `values`."""
        found: np.ndarray = (self.weights / (np.asarray(values)[..., None] + self.shifts)).sum(-1)
        return found


def quadrature(smallest: float, largest: float, q: int | None = None, error: float | None = None) -> Quadrature:
    """The quadrature with `q` points, or with as many as the relative `error` needs."""
    if not 0 < smallest <= largest < math.inf:
        raise InvalidRequestError(
            f"a spectrum from {smallest:.3g} to {largest:.3g}: allowed are 0 < smallest <= largest"
        )
    if q is None:
        q = points(smallest, largest, 1e-4 if error is None else error)
    if isinstance(q, bool) or not isinstance(q, int | np.integer) or not 1 <= q <= LARGEST_Q:
        raise InvalidRequestError(f"q={q}: allowed are 1 to {LARGEST_Q} quadrature points (q=)")
    ratio = smallest / largest
    root = math.sqrt(ratio)
    # SciPy takes the parameter m = 1 - ratio; near 1 only its complement has digits.
    period = float(ellipkm1(ratio)) if ratio < 0.5 else float(ellipk(1 - ratio))
    at = (np.arange(1, q + 1) - 0.5) * period / q
    # SciPy's functions lose their digits near the quarter period; there they are those of what is left to it.
    near = at <= period / 2
    sn, cn, dn, _ = ellipj(np.where(near, at, period - at), 1 - ratio)
    return Quadrature(
        smallest=smallest,
        largest=largest,
        shifts=np.where(near, smallest * (sn / cn) ** 2, largest * (cn / sn) ** 2),
        weights=2 * period * math.sqrt(smallest) / (math.pi * q) * np.where(near, dn / cn**2, dn / sn**2 / root),
    )


def points(smallest: float, largest: float, error: float, dual: bool = False) -> int:
    """The number of points for a relative error.

    In the dual form the first term is cancelled down inside the data space, which costs a factor sqrt(kappa) there.
    """
    if not 0 < error < 1:
        raise InvalidRequestError(f"error={error}: allowed are numbers between 0 and 1 (error=)")
    log_condition = _log_condition(smallest, largest)
    wanted = math.log(4 / error) + (log_condition / 2 if dual else 0)
    return max(1, math.ceil((log_condition + 3) * wanted / (2 * math.pi**2)))


def _log_condition(smallest: float, largest: float) -> float:
    return math.log(largest / smallest)

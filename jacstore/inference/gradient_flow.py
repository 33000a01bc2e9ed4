"""Training curves of the network linearised at its parameters, from an eigendecomposed kernel.

Gradient flow `df/dt = -G (f - y)` of the loss `|f - y|² / 2`, summed over rows. Gradient descent with step size eta has
come to `t = eta * steps`; on the mean over N examples to `t = eta * steps / N`.

References
----------
Jacot, Gabriel, Hongler 2018, arXiv:1806.07572. Lee et al. 2019, arXiv:1902.06720.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jacstore.errors import InvalidRequestError
from jacstore.inference.kernel_factor import KernelFactor
from jacstore.inference.kernel_matrix import as_columns, cross_gram, offset_like


@dataclass(frozen=True, kw_only=True)
class TrainingCurve:
    """Outputs and mean squared errors at each time.

    Attributes
    ----------
    times
        `(T,)`.
    train, test
        Outputs `(T, ...)`, then in the shape of `y`; `test` is None without a cross kernel.
    train_error, test_error
        Mean squared errors `(T,)`; the second None without `y_cross`.
    """

    times: np.ndarray
    train: np.ndarray
    test: np.ndarray | None
    train_error: np.ndarray
    test_error: np.ndarray | None


def gradient_flow(
    factor: KernelFactor,
    times: Any,
    y: Any,
    f0: Any = None,
    *,
    cross: Any = None,
    f0_cross: Any = None,
    y_cross: Any = None,
) -> TrainingCurve:
    """Outputs of the linearised network while it is trained from f0 towards y, on its examples and on others.

    Parameters
    ----------
    factor
        A factor of method eigh; its alpha is not used.
    times
        `(T,)`, finite and at least 0.
    y, f0
        Targets and first outputs, `(R, ...)` or `(N, K, ...)`; f0 is 0 if not given.
    cross
        Kernel between other examples (rows) and these (columns); one pass over it for all times.
    f0_cross, y_cross
        First outputs of the others, 0 if not given, and targets to compare with.
    """
    try:
        t = np.asarray(times, np.float64)
    except (TypeError, ValueError):
        t = np.array([])
    if t.ndim != 1 or not t.size or not np.all((t >= 0) & np.isfinite(t)):
        raise InvalidRequestError(f"times={times}: allowed are finite numbers (T,) of at least 0")
    target = np.asarray(y, np.float64)
    first = offset_like(f0, target.shape, "f0")
    missing, columns = as_columns(target - first, factor.n_rows, factor.n_outputs, "y")
    values, vectors = factor.eigenvalues, factor.eigenvectors
    turned = vectors.T @ missing
    left = np.stack([vectors @ (decay[:, None] * turned) for decay in np.exp(-np.outer(t, values))])
    train = target - columns.restore(left)
    test = test_error = None
    if cross is not None:
        weights = [vectors @ (gain[:, None] * turned) for gain in _gain(t, values)]
        product = cross_gram(cross, factor.gram).matmat(np.concatenate(weights, 1))
        test = columns.restore(np.stack(np.split(product, len(t), 1)))
        test = test + offset_like(f0_cross, test.shape[1:], "f0_cross")
    if y_cross is not None:
        if test is None or np.shape(y_cross) != test.shape[1:]:
            raise InvalidRequestError(f"y_cross of shape {np.shape(y_cross)} needs cross= with as many examples")
        test_error = _mean_square(test - np.asarray(y_cross, np.float64))
    return TrainingCurve(times=t, train=train, test=test, train_error=_mean_square(left), test_error=test_error)


def _gain(times: np.ndarray, values: np.ndarray) -> np.ndarray:
    """`(1 - exp(-t lam)) / lam` `(T, R)`, and its limit t at lam = 0."""
    positive = np.where(values > 0, values, 1)
    return np.where(values > 0, -np.expm1(-np.outer(times, values)) / positive, times[:, None])


def _mean_square(missed: np.ndarray) -> np.ndarray:
    return np.square(missed).reshape(len(missed), -1).mean(1)

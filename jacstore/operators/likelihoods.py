"""The curvature Λ of a loss in the outputs of the network, one `(K, K)` block per example.

Gaussian: the identity. Softmax (cross-entropy of logits with probabilities p): `diag(p) - p pᵀ`, whatever the label.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jacstore.errors import InvalidRequestError

LIKELIHOODS = ("gaussian", "softmax")


class Weights:
    """Λ, a symmetric matrix of `(N * K, N * K)` with one block an example, as what multiplies outputs.

    Parameters
    ----------
    form
        "identity", "diagonal" with `values` `(N, K)`, "softmax" with probabilities `(N, K)`, or "blocks" `(N, K, K)`.
    """

    def __init__(self, form: str, values: np.ndarray | None = None) -> None:
        self.form, self.values = form, values

    def times(self, y: np.ndarray, where: Any) -> np.ndarray:
        """Λ y for examples `where`, y `(n, K, m)`; y itself for the identity."""
        if self.values is None:
            return y
        values = self.values[where]
        if self.form == "blocks":
            return np.matmul(values, y)
        weighted: np.ndarray = values[..., None] * y
        if self.form == "softmax":
            weighted -= values[..., None] * weighted.sum(1, keepdims=True)
        return weighted


def likelihood_weights(likelihood: str, outputs: np.ndarray, all_outputs: bool) -> Weights:
    """Λ of a likelihood at outputs `(N, K)`, which softmax takes for logits.

    Raises
    ------
    InvalidRequestError
        For another likelihood, or if softmax is asked for without all logits.
    """
    if likelihood == "gaussian":
        return Weights("identity")
    if likelihood != "softmax":
        raise InvalidRequestError(f"likelihood {likelihood!r}: allowed are {', '.join(LIKELIHOODS)} (likelihood=)")
    if not all_outputs:
        raise InvalidRequestError(
            'likelihood "softmax" needs all logits; this store was built from a choice of outputs: build it with '
            'outputs="all", or take likelihood="gaussian" or weights of your own'
        )
    if not np.isfinite(outputs).all():
        raise InvalidRequestError(
            'likelihood "softmax": the store holds outputs that are not finite, or none; write them with the rows '
            "(outputs=), or give weights of your own (weights=)"
        )
    outputs = outputs.astype(np.float64)
    exponentials = np.exp(outputs - outputs.max(1, keepdims=True))
    return Weights("softmax", exponentials / exponentials.sum(1, keepdims=True))


def given_weights(given: Any, n_examples: int, n_outputs: int) -> Weights:
    """Λ from an array: `(N * K,)` or `(N, K)` for its diagonal, `(N, K, K)` for its blocks, symmetric.

    Raises
    ------
    InvalidRequestError
        If it has another shape, is not real, or a block is not symmetric.
    """
    values = np.asarray(given)
    n, k = n_examples, n_outputs
    if values.dtype.kind not in "fiub" or values.shape not in ((n * k,), (n, k), (n, k, k)):
        raise InvalidRequestError(
            f"weights: {values.dtype} of shape {values.shape}; allowed are real numbers of shape {(n * k,)}, {(n, k)} "
            f'or {(n, k, k)}, or "gaussian" or "softmax" (weights=)'
        )
    # A copy: what the caller does to theirs later is nothing to the operator.
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        raise InvalidRequestError("weights: some are NaN or infinite; curvature is finite (weights=)")
    if values.shape == (n, k, k):
        if not np.allclose(values, values.transpose(0, 2, 1), rtol=1e-10, atol=0):
            raise InvalidRequestError("weights: a block is not symmetric; curvature is; give (B + Bᵀ) / 2 (weights=)")
        return Weights("blocks", values)
    return Weights("diagonal", values.reshape(n, k))

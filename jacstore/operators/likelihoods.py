"""Likelihoods: the derivatives of a loss by the outputs of the network, one class per likelihood.

A class says all that is known of a likelihood, and `LIKELIHOODS` registers it: products with `Jᵀ Λ J`, weighted
kernels, samples, gradients of losses and the flag of the command line take it from there. The curvature Λ has one
`(K, K)` block per example: the second derivative of the negative log-likelihood by the outputs, or its expectation
where that depends on the label, since Λ must not be negative.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from scipy.special import softmax

from jacstore.errors import InvalidRequestError

# --- forms of Λ -------------------------------------------------------------------------------------------------------


class Weights:
    """Λ, a symmetric matrix of `(N * K, N * K)` with one block per example, as what multiplies outputs."""

    # Whether products with Λ leave everything as it is.
    identity: ClassVar[bool] = False

    def times(self, y: np.ndarray, where: Any) -> np.ndarray:
        """Λ y for examples `where`, y `(n, K, m)`."""
        raise NotImplementedError


class Identity(Weights):
    """Λ = I."""

    identity = True

    def times(self, y: np.ndarray, where: Any) -> np.ndarray:
        return y


class Diagonal(Weights):
    """Λ from its diagonal `(N, K)`."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def times(self, y: np.ndarray, where: Any) -> np.ndarray:
        product: np.ndarray = self.values[where][..., None] * y
        return product


class Categorical(Diagonal):
    """Blocks `diag(p) - p pᵀ` from probabilities p `(N, K)`, without forming them."""

    def times(self, y: np.ndarray, where: Any) -> np.ndarray:
        weighted = super().times(y, where)
        weighted -= self.values[where][..., None] * weighted.sum(1, keepdims=True)
        return weighted


class Blocks(Weights):
    """Λ from its blocks `(N, K, K)`."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def times(self, y: np.ndarray, where: Any) -> np.ndarray:
        return np.matmul(self.values[where], y)


# --- likelihoods ------------------------------------------------------------------------------------------------------


class Likelihood:
    """What jacstore asks of a likelihood, at outputs f `(N, K)` in float64.

    Attributes
    ----------
    name
        The word that `likelihood=` and `--likelihood` take.
    loss
        The word of `loss_gradients` for its negative logarithm.
    constant
        Whether Λ is the identity whatever the outputs, which then need not be known.
    couples_outputs
        Whether Λ of one output depends on the others, so that all of them are needed.
    """

    name: ClassVar[str]
    loss: ClassVar[str]
    constant: ClassVar[bool] = False
    couples_outputs: ClassVar[bool] = False

    def gradient(self, f: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The first derivative of the negative log-likelihood of targets y `(N, K)`, `(N, K)`."""
        raise NotImplementedError

    def curvature(self, f: np.ndarray) -> Weights:
        """Λ."""
        raise NotImplementedError

    def root(self, f: np.ndarray) -> np.ndarray:
        """L `(N, K, K)` with `L Lᵀ = Λ`."""
        raise NotImplementedError

    def require(self, outputs: np.ndarray, all_outputs: bool) -> None:
        """Refuse outputs of a store that say nothing about Λ.

        Raises
        ------
        InvalidRequestError
            Naming what is missing.
        """
        if self.couples_outputs and not all_outputs:
            raise InvalidRequestError(
                f'likelihood "{self.name}" needs all outputs; this store was built from a choice of them: build it '
                'with outputs="all", or take likelihood="gaussian" or weights of your own'
            )
        if not self.constant and not np.isfinite(outputs).all():
            raise InvalidRequestError(
                f'likelihood "{self.name}": the store holds outputs that are not finite, or none; write them with the '
                "rows (outputs=), or give weights of your own (weights=)"
            )


class Gaussian(Likelihood):
    """Independent outputs of unit variance: the loss is `|f - y|² / 2`, Λ the identity."""

    name, loss, constant = "gaussian", "squared", True

    def gradient(self, f: np.ndarray, y: np.ndarray) -> np.ndarray:
        return f - y

    def curvature(self, f: np.ndarray) -> Weights:
        return Identity()

    def root(self, f: np.ndarray) -> np.ndarray:
        return np.broadcast_to(np.eye(f.shape[1]), (*f.shape, f.shape[1]))


class Softmax(Likelihood):
    """Cross-entropy of logits with probabilities p: `Λ = diag(p) - p pᵀ`, whatever the label."""

    name, loss, couples_outputs = "softmax", "softmax", True

    def gradient(self, f: np.ndarray, y: np.ndarray) -> np.ndarray:
        return softmax(f, axis=1) - y

    def curvature(self, f: np.ndarray) -> Weights:
        return Categorical(softmax(f, axis=1))

    def root(self, f: np.ndarray) -> np.ndarray:
        """`diag(sqrt p) - p sqrt(p)ᵀ`."""
        p = softmax(f, axis=1)
        root = np.sqrt(p)
        return root[:, :, None] * np.eye(f.shape[1]) - p[:, :, None] * root[:, None, :]


LIKELIHOODS: dict[str, Likelihood] = {one.name: one for one in (Gaussian(), Softmax())}


def likelihood_of(given: Any) -> Likelihood:
    """The likelihood of a name.

    Raises
    ------
    InvalidRequestError
        If there is none.
    """
    if not isinstance(given, str) or given not in LIKELIHOODS:
        shown = given if isinstance(given, str) else type(given).__name__
        raise InvalidRequestError(f"--likelihood {shown}: allowed are {', '.join(LIKELIHOODS)} (likelihood=)")
    return LIKELIHOODS[given]


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
            f"or {(n, k, k)}, or a likelihood: {', '.join(LIKELIHOODS)} (weights=)"
        )
    # A copy: what the caller does to theirs later is nothing to the operator.
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        raise InvalidRequestError("weights: some are NaN or infinite; curvature is finite (weights=)")
    if values.shape == (n, k, k):
        if not np.allclose(values, values.transpose(0, 2, 1), rtol=1e-10, atol=0):
            raise InvalidRequestError("weights: a block is not symmetric; curvature is; give (B + Bᵀ) / 2 (weights=)")
        return Blocks(values)
    return Diagonal(values.reshape(n, k))

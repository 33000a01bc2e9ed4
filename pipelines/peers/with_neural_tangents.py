"""Time the kernel of a network, given as npz, by neural-tangents' three implementations, as `serve` describes.

Runs where neural-tangents 0.6.5 and jax 0.4.23 are installed. `neural_tangents.batch` computes all blocks; here only
those on and above the diagonal are asked for, which it could not do better.

References
----------
Novak, Sohl-Dickstein, Schoenholz 2022, arXiv:2206.08720, on the three implementations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import neural_tangents as nt
import numpy as np
from jax import lax
from serve import load, measure, serve

WAYS = {
    "jacobian contraction": nt.NtkImplementation.JACOBIAN_CONTRACTION,
    "ntk-vector products": nt.NtkImplementation.NTK_VECTOR_PRODUCTS,
    "structured derivatives": nt.NtkImplementation.STRUCTURED_DERIVATIVES,
}


def mlp(params: Any, x: jax.Array) -> jax.Array:
    """Summed outputs `(B, 1)` of a batch `(B, width)`."""
    for n, layer in enumerate(params):
        x = (jax.nn.relu(x) if n else x) @ layer["weight"] + layer["bias"]
    return x.sum(-1, keepdims=True)


def cnn(params: Any, x: jax.Array) -> jax.Array:
    """Summed outputs `(B, 1)` of a batch of images `(B, height, width, channels)`."""
    *convolutions, dense = params
    for layer in convolutions:
        x = lax.conv_general_dilated(x, layer["weight"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + layer["bias"])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x.reshape(len(x), -1) @ dense["weight"] + dense["bias"]
    return x.sum(-1, keepdims=True)


class Blocks:
    """A compiled kernel function between two blocks of examples."""

    def __init__(self, network: str, way: str, block: int) -> None:
        net, params, self.inputs = load(network)
        self.params = jax.tree_util.tree_map(jnp.asarray, list(params.values()))
        function = nt.empirical_ntk_fn(
            {"mlp": mlp, "cnn": cnn}[net], trace_axes=(), vmap_axes=0, implementation=WAYS[way]
        )
        example = jnp.asarray(self.inputs[:block])
        self.program = jax.jit(function).lower(example, example, self.params).compile()

    def rows(self, examples: slice) -> jax.Array:
        return jnp.asarray(self.inputs[examples])

    def product(self, left: jax.Array, right: jax.Array) -> np.ndarray:
        return np.asarray(self.program(left, right, self.params))[:, :, 0, 0]


def prepare(network: str, request: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    tool = Blocks(network, request["way"], request["block"])
    return partial(measure, tool, len(tool.inputs))


if __name__ == "__main__":
    serve(prepare)

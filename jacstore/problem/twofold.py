"""Compile a function of one example quickly, for checks that run it on few examples.

On a CPU, XLA generates code for each product of a matrix with a vector, which costs LLVM some 20 ms each; a product of
a matrix with two vectors is left to a library. Where the function allows it, checks therefore compute two copies of an
example at once, and a network of a hundred layers compiles in a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np

from jacstore.base.devices import device

# LLVM takes most of the time that a deep network takes to compile. No pass of XLA's is left out: without fusion, a
# transform of two signals was transposed wrongly.
QUICK = {"xla_backend_optimization_level": 0}
# Primitives that a batch computes differently from one example, or at twice the cost.
OTHERWISE = {"cond", "while", "conv_general_dilated", "custom_vmap_call", "shard_map"}


def gains(primitives: Collection[str]) -> bool:
    """Whether two copies at once compile faster than one example, and certainly compute the same."""
    plain = not OTHERWISE.intersection(primitives) and not any("callback" in name for name in primitives)
    return plain and "dot_general" in primitives and device().platform == "cpu"


def twice(example: Any) -> Any:
    """Two copies `(2, ...)` of an example; as arguments, so that XLA cannot see that they are alike."""
    return jax.tree_util.tree_map(lambda leaf: np.stack([leaf, leaf]), example)


def of_two(function: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """`function(selected, rest, example) -> (K,)` for two examples at once, `(2, K)`."""
    return jax.vmap(function, in_axes=(None, None, 0))


def compiled_quickly(lowered: Any) -> Callable[..., Any]:
    """Compile with options that make compilation fast rather than the program."""
    if device().platform == "cpu":
        try:
            return lowered.compile(compiler_options=QUICK)
        except jax.errors.JaxRuntimeError:
            pass  # another XLA may not know these options
    return lowered.compile()

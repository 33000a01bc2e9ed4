"""In: a user's `apply`. Out: `(selected, rest, example) -> (K,)`, its outputs flattened, and the choice among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import index
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jacstore.blame import naming
from jacstore.errors import Refused
from jacstore.parameters import Parameters
from jacstore.pytrees import dtype_of, is_kind, paths_and_leaves, type_name

Flat = Callable[[list[Any], list[Any], Any], jax.Array]


def checked_outputs(outputs: Any) -> str | tuple[int, ...]:
    allowed = 'allowed are "all", "sum" or a list of different indices from 0; change outputs='
    if isinstance(outputs, str):
        if outputs not in ("all", "sum"):
            raise Refused(f"outputs is {outputs!r}; {allowed}")
        return outputs
    try:
        chosen = tuple(outputs)
        if any(isinstance(k, (bool, np.bool_)) for k in chosen):
            raise TypeError("a mask, not indices")
        chosen = tuple(index(k) for k in chosen)
    except TypeError as error:
        raise Refused(f"outputs is {outputs!r} ({error}); {allowed}") from error
    repeated = sorted(k for k, count in Counter(chosen).items() if count > 1)
    if repeated:
        raise Refused(f"outputs names {repeated[0]} twice; {allowed}")
    if not chosen or min(chosen) < 0:
        raise Refused(f"outputs is {list(chosen)}; {allowed}")
    return chosen


def flat_function(problem: Problem, parameters: Parameters) -> Flat:
    """All outputs of one example, `(selected, rest, example) -> (K,)`, before any are chosen."""

    def flat(selected: list[Any], rest: list[Any], example: Any) -> jax.Array:
        params = parameters.join(selected, rest)
        if not problem.batched:
            return flatten_outputs(problem.apply(params, example))
        batch = jax.tree_util.tree_map(lambda leaf: jnp.expand_dims(leaf, 0), example)
        return flatten_outputs(first_of_batch(problem.apply(params, batch), 1))

    return flat


def first_of_batch(outputs: Any, size: int) -> Any:
    for path, leaf in paths_and_leaves(outputs):
        shape = jnp.shape(leaf)
        if shape[:1] != (size,):
            raise Refused(
                f"apply returned output {path!r} of shape {shape} for a batch of {size}; with batched=True the first "
                f"axis has to be {size}; change apply= or batched="
            )
    return jax.tree_util.tree_map(lambda leaf: leaf[0], outputs)


def flatten_outputs(outputs: Any) -> jax.Array:
    """A pytree of floating outputs as one vector `(K,)`, leaves in tree order."""
    parts = []
    for path, leaf in paths_and_leaves(outputs):
        dtype = dtype_of(leaf)
        if not is_kind(dtype, np.floating):
            raise Refused(
                f"apply returned output {path!r} of type {type_name(leaf)}; outputs have to be floating point; drop or "
                "convert it in apply="
            )
        parts.append(jnp.ravel(leaf))
    if not sum(part.size for part in parts):
        raise Refused("apply returned no outputs (K = 0); at least one is needed; change apply=")
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def chosen(flat: jax.Array, outputs: str | Sequence[int]) -> jax.Array:
    if outputs == "all":
        return flat
    if outputs == "sum":
        return jnp.sum(flat, keepdims=True)
    return flat.at[np.asarray(outputs)].get(mode="promise_in_bounds", unique_indices=True)


def count_chosen(n_all: int, outputs: str | Sequence[int]) -> int:
    return n_all if outputs == "all" else 1 if outputs == "sum" else len(outputs)


def calling(example: Any) -> Any:
    given = ", ".join(f"{path!r}: {leaf.dtype}{list(leaf.shape)}" for path, leaf in paths_and_leaves(example))
    return naming(
        "apply raised",
        f"it gets params and one example ({given}), no batch axis; change apply=, or batched=True if it needs one",
    )


def count_outputs(flat: Flat, parameters: Parameters, example: Any) -> int:
    with calling(example):
        return int(jax.eval_shape(flat, parameters.selected, parameters.rest, example).size)

"""Refuse a function that is not a function of parameters and one example, by probing it on example 0."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jacstore.base.precision import ROUNDOFF
from jacstore.errors import InvalidFunctionError, JacstoreError
from jacstore.problem.fingerprint import same_program
from jacstore.problem.outputs import Flat, calling, first_of_batch, flatten_outputs
from jacstore.problem.parameters import Parameters
from jacstore.problem.program import Recent, traced_anew
from jacstore.problem.twofold import compiled_quickly, of_two, twice

# Draws of moved numbers, and how many times as far as these move a gradient rounding may have moved it.
SHAKES, SHAKEN = 4, 8
# Rounding, also in bfloat16, moves outputs by less than this; other random numbers move them by about their size.
OTHER_FUNCTION = 0.1


def probe(
    flat: Flat,
    parameters: Parameters,
    example: Any,
    batched_apply: Callable[[Any, Any], Any] | None,
    two_at_once: bool,
    made: Recent,
) -> np.ndarray:
    """Check on example 0 that outputs are finite, repeatable and of one example alone; return them `(K,)`.

    Parameters
    ----------
    batched_apply
        The user's function where it takes a batch, None where it sees one example and cannot couple any.
    two_at_once
        Whether each call is of two copies of the example, which compiles faster.
    made
        What was compiled for an equal function before, or is now.

    Raises
    ------
    InvalidFunctionError
        Naming what is wrong and what to change.
    """
    finite = all(_finite(leaf) for leaf in jax.tree_util.tree_leaves(example))
    # A non-finite example is the build's to report; with its holes filled the other two probes still mean something.
    example = jax.tree_util.tree_map(_filled, example)
    with calling(example):
        once, again = _two_calls(flat, parameters, example, two_at_once, made)
    if finite and not _finite(once):
        k = int(np.argmin(np.isfinite(once.astype(np.float64))))
        named = zip(parameters.leaves, parameters.selected, strict=True)
        bad = [leaf.path for leaf, value in named if not _finite(value)]
        cause = f"params leaf {bad[0]!r} is not finite either" if bad else "its input is finite"
        raise InvalidFunctionError(
            f"output {k} of example 0 is {once[k]}, {cause}; outputs have to be finite; change apply= or params="
        )
    if not _same_call(once, again):
        raise InvalidFunctionError(
            "outputs change from call to call (dropout? noise?); they have to depend on params and example alone; "
            "switch it off (eval mode) or close over a fixed random key in apply="
        )
    if batched_apply is not None:
        _probe_batch(batched_apply, parameters, example, once, made)
    return once


def outputs_of(flat: Flat, parameters: Parameters, example: Any, made: Recent) -> np.ndarray | None:
    """Outputs `(K,)` of one example, holes filled as for the probe; None where JAX still mixes types that it kept."""
    example = jax.tree_util.tree_map(_filled, example)
    given = parameters.selected, parameters.rest, example
    with calling(example):
        try:
            program = made.made("as given", lambda: _or_forgotten(lambda: jax.jit(flat).lower(*given).compile()))
            return np.asarray(program(*given))
        except (TypeError, ValueError) as error:
            if not _mixes_types(error):
                raise
            return None


def probe_upcast(as_given: np.ndarray | None, in_float64: np.ndarray) -> None:
    """Check that the function computes the same in float64.

    Raises
    ------
    InvalidFunctionError
        If the outputs in float64 differ from those in the parameters' own precision.
    """
    if as_given is None:
        return
    given = as_given.astype(np.float64)
    if not np.isfinite(given).all():
        return
    off, size = np.linalg.norm(given - in_float64), np.linalg.norm(in_float64)
    if off > OTHER_FUNCTION * size:
        raise InvalidFunctionError(
            f"outputs in float64 are others than in the parameters' own precision: they differ by {off / size:.2g} of "
            "their size. Where apply= draws random numbers, JAX's default type draws others: give its jax.random calls "
            "a dtype=, choose another --dtype (dtype=), or enable JAX's 64-bit types and give params= in float64"
        )


def _two_calls(
    flat: Flat, parameters: Parameters, example: Any, two_at_once: bool, made: Recent
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of two calls, each traced anew; a program that comes out the same both times is compiled once."""
    if two_at_once:
        # If it cannot be computed for two examples, the build reports it.
        with suppress(Exception):
            once, again = _called_twice(of_two(flat), (parameters.selected, parameters.rest, twice(example)), made)
            return once[0], again[0]
    return _called_twice(flat, (parameters.selected, parameters.rest, example), made)


def _called_twice(function: Flat, arguments: tuple[Any, ...], made: Recent) -> tuple[np.ndarray, np.ndarray]:
    key = "outputs", tuple(np.shape(leaf) for leaf in jax.tree_util.tree_leaves(arguments[2]))
    kept = made.get(key)
    if kept is not None:
        return np.asarray(kept(*arguments)), np.asarray(kept(*arguments))
    first, lowered = _or_forgotten(lambda: _traced_and_lowered(function, arguments))
    program = compiled_quickly(lowered)
    once = np.asarray(program(*arguments))
    # A jit inside apply keeps what it traced, and with it the first call's noise.
    with traced_anew():
        second = _traced_anew(function, arguments)
    if not same_program(first.jaxpr, second.jaxpr):
        program = compiled_quickly(second.lower())
    else:
        made.keep(key, program)
    return once, np.asarray(program(*arguments))


def _or_forgotten(call: Callable[[], Any]) -> Any:
    """Call a function that traces, and again with JAX's caches emptied if JAX mixed types that it had cached.

    JAX 0.10 caches the arrays that a function closes over even if 64-bit types were switched on or off since, and then
    refuses to add 32-bit and 64-bit numbers.
    """
    try:
        return call()
    except (TypeError, ValueError) as error:
        if not _mixes_types(error):
            raise
        jax.clear_caches()
        return call()


def _mixes_types(error: Exception) -> bool:
    said = "" if isinstance(error, JacstoreError) else str(error)
    return "requires arguments to have the same dtypes" in said or "jaxpr with verifier errors" in said


def _traced_and_lowered(flat: Flat, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    traced = _traced_anew(flat, arguments)
    return traced, traced.lower()


def _traced_anew(flat: Flat, arguments: tuple[Any, ...]) -> Any:
    def anew(selected: list[Any], rest: list[Any], example: Any) -> jax.Array:
        return flat(selected, rest, example)

    # jit caches by function: one that is new is traced anew.
    return jax.jit(anew).trace(*arguments)


def _probe_batch(
    apply: Callable[[Any, Any], Any], parameters: Parameters, example: Any, alone: np.ndarray, made: Recent
) -> None:
    """Compare example 0 alone with example 0 beside another one; beside itself would hide BatchNorm."""
    batch = jax.tree_util.tree_map(lambda leaf: np.stack([leaf, perturbed(np.asarray(leaf))]), example)

    def flat(selected: list[Any], rest: list[Any], batch: Any) -> jax.Array:
        return flatten_outputs(first_of_batch(apply(parameters.join(selected, rest), batch), 2))

    given = parameters.selected, parameters.rest, batch
    with calling(example):
        beside = np.asarray(made.made("batch", lambda: jax.jit(flat).lower(*given).compile())(*given))
    if not (alone.shape == beside.shape and _close(alone, beside)):
        raise InvalidFunctionError(
            "outputs depend on the other examples of the batch (BatchNorm in training mode?); they have to depend on "
            "one example; use eval mode, or close over the statistics in apply="
        )


def _finite(array: Any) -> bool:
    array = np.asarray(array)
    return not jnp.issubdtype(array.dtype, np.floating) or bool(np.isfinite(array.astype(np.float64)).all())


def _filled(leaf: np.ndarray) -> np.ndarray:
    return leaf if _finite(leaf) else np.where(np.isfinite(leaf.astype(np.float64)), leaf, 0).astype(leaf.dtype)


def _same_call(once: np.ndarray, again: np.ndarray) -> bool:
    """Equal to the bit on a CPU; accelerators add scattered values in any order, so there up to rounding."""
    if once.tobytes() == again.tobytes():
        return True
    return jax.default_backend() != "cpu" and _close(once, again)


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether `‖a - b‖ <= sqrt(eps) ‖a‖` (3e-4 in float32).

    Products over a batch of two may add in another order than over one, an error of some eps; a coupling of examples
    moves the outputs by about their own size, because the perturbation does so to the inputs.
    """
    tolerance = float(jnp.finfo(a.dtype).eps) ** 0.5
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return bool(np.array_equal(a, b, equal_nan=True))
    return bool(np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(a), np.linalg.norm(b)))


def perturbed(leaf: np.ndarray) -> np.ndarray:
    """Another example of the same kind: far away if floating, of values that occur if integer (they may be indices)."""
    if jnp.issubdtype(leaf.dtype, np.inexact):
        with np.errstate(over="ignore"):
            return (1 + 2 * leaf).astype(leaf.dtype)
    if leaf.dtype == np.bool_:
        return ~leaf
    flipped = np.flip(leaf)
    return flipped if (flipped != leaf).any() else np.where(leaf > 0, leaf - 1, leaf + 1).astype(leaf.dtype)


def shaken(tree: Any, rounding: float, draw: np.random.Generator) -> Any:
    """Floating numbers of a tree moved by about a rounding: of relative size `rounding`, or of their own type's."""

    def shake(leaf: Any) -> Any:
        array = np.asarray(leaf)
        if not jnp.issubdtype(array.dtype, np.floating):
            return leaf
        own = max(rounding, ROUNDOFF.get(array.dtype.name, 0.0))
        return (array.astype(np.float64) * (1 + own * draw.uniform(-2, 2, array.shape))).astype(array.dtype)

    return jax.tree_util.tree_map(shake, tree)

"""The fields of a problem's fingerprint: hashes of its parameters, function and choices, as JSON.

The text of a jaxpr names the arrays that it closes over but does not hold their values, so these are hashed separately.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jacstore.base.limits import LIMITS
from jacstore.base.precision import ROUNDOFF
from jacstore.problem.outputs import Flat
from jacstore.problem.parameters import Parameters
from jacstore.problem.program import KeptProgram, certain_text, program_text, text_of_jax
from jacstore.problem.pytrees import dtype_of, native, paths_and_leaves
from jacstore.problem.user_errors import kind_of, reraise_user_error

# Before a hash of `program_text`; stores written before hold a bare hash of JAX's own text, which continue as well.
VERSION = "program-2:"


def requested(
    *,
    params: Any,
    function: Mapping[str, str],
    outputs: str | Sequence[int],
    selection: list[str],
    first: Any,
    n_examples: int,
) -> dict[str, Any]:
    """The fields that decide the result.

    Parameters
    ----------
    function
        `hash_function` of the function and its derivative.
    first
        Example 0 as it was read, `(1, ...)`: shapes and types of the inputs, before any cast.
    """
    return {
        "parameters": hash_parameters(params),
        **function,
        "outputs": outputs if isinstance(outputs, str) else list(outputs),
        "selection": selection,
        "inputs": [[path, list(leaf.shape[1:]), str(leaf.dtype)] for path, leaf in paths_and_leaves(first)],
        "examples": n_examples,
    }


def hash_function(jaxpr: ClosedJaxpr) -> dict[str, str]:
    """The fields `function` and `constants` of a function and its derivative, from `derivative`."""
    return {
        "function": VERSION + hashlib.sha256(program_text(jaxpr).encode()).hexdigest(),
        "constants": hash_constants(jaxpr),
    }


def by_text_of_jax(function: Any) -> bool:
    """Whether a store's field `function` was written by a version that hashed JAX's own text."""
    return isinstance(function, str) and not function.startswith(VERSION)


def hash_text_of_jax(jaxpr: ClosedJaxpr) -> str:
    """The field `function` as such a store holds it."""
    return hashlib.sha256(text_of_jax(jaxpr).encode()).hexdigest()


def same_program(a: ClosedJaxpr, b: ClosedJaxpr) -> bool:
    """Whether two traces certainly compute the same; what a callback computes cannot be read from a jaxpr."""
    text = certain_text(a)
    return text is not None and text == program_text(b) and hash_constants(a) == hash_constants(b)


def exact_hash(jaxpr: ClosedJaxpr) -> str | None:
    """Hash of all that a program computes; None where it cannot be read from it, or closes over large arrays.

    Programs of equal hashes compute the same of the same arguments.
    """
    closed_over = sum(int(getattr(value, "nbytes", 0)) for value in jaxpr.consts)
    text = None if closed_over > LIMITS.kept_constants_bytes else certain_text(jaxpr)
    return None if text is None else hashlib.sha256(f"{hash_constants(jaxpr)}\n{text}".encode()).hexdigest()


def still_holds(kept: KeptProgram) -> bool:
    """Whether arrays that a program closes over have the values that they had when it was traced.

    What is compiled after they were written to, by a listener for instance, is of another program, and not to be kept.
    """
    return kept.jaxpr is None or kept.digest is None or exact_hash(kept.jaxpr) == kept.digest


def lowest_precision(jaxpr: ClosedJaxpr) -> str:
    """The type with the fewest digits that any number of a program is rounded to; a key of `precision.ROUNDOFF`."""
    found = {"float64"}

    def visit(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for part in value:
                visit(part)
        if not isinstance(value, (ClosedJaxpr, Jaxpr)):
            return
        for equation in getattr(value, "jaxpr", value).eqns:
            for variable in equation.outvars:
                dtype = getattr(variable.aval, "dtype", None)
                if dtype is not None and jnp.issubdtype(dtype, np.floating):
                    name = np.dtype(dtype).name
                    found.add(name if name in ROUNDOFF else "float8" if name.startswith("float8") else "float64")
            # Only a product that asks for it gets TF32: all others are computed in full precision.
            if jax.lax.Precision.DEFAULT in _flat(equation.params.get("precision")):
                found.add("tf32")
            for part in equation.params.values():
                visit(part)

    visit(jaxpr)
    return max(found, key=lambda name: ROUNDOFF[name])


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def derivative(flat: Flat, parameters: Parameters, example: Any) -> ClosedJaxpr:
    """Outputs and VJP of one example as a jaxpr, so that custom derivative rules are inside.

    Its arguments are the parameters in tree order whatever is selected: another selection is the same function.
    """
    streams = {"selected": iter(parameters.selected), "rest": iter(parameters.rest)}
    roles = [role for role in parameters.roles if role != "fixed"]
    arrays = [next(streams[role]) for role in roles]

    def trace(moving: list[int]) -> ClosedJaxpr:
        def value_and_vjp(arrays: list[Any], example: Any) -> Any:
            def outputs(moved: list[Any]) -> jax.Array:
                whole = dict(enumerate(arrays)) | dict(zip(moving, moved, strict=True))
                groups = [[whole[i] for i, role in enumerate(roles) if role == kind] for kind in ("selected", "rest")]
                return flat(groups[0], groups[1], example)

            value, pull = jax.vjp(outputs, [arrays[i] for i in moving])
            return value, pull(jnp.ones_like(value))

        return jax.make_jaxpr(value_and_vjp)(arrays, example)

    floating = [i for i, array in enumerate(arrays) if jnp.issubdtype(array.dtype, np.floating)]
    selected = [i for i, role in enumerate(roles) if role == "selected"]
    if floating != selected:
        # Parameters that are left out may have no derivative (a frozen backbone in a callback); then only the selected
        # ones are traced.
        with suppress(Exception):
            return trace(floating)
    with reraise_user_error("apply cannot be differentiated:", "change apply=, or leave the leaf out by select="):
        return trace(selected)


def backward(flat: Flat, selected: list[Any], rest: list[Any], example: Any, outputs: Any) -> ClosedJaxpr:
    """Outputs of one example and gradients of the selected leaves, for a cotangent of the shape and type of `outputs`.

    Its arguments are those of the function and the cotangent.
    """

    def values_and_gradients(selected: Any, rest: Any, example: Any, cotangent: Any) -> Any:
        values, pullback = jax.vjp(lambda leaves: flat(leaves, rest, example), selected)
        return values, pullback(cotangent)[0]

    return jax.make_jaxpr(values_and_gradients)(selected, rest, example, np.zeros(outputs.shape, outputs.dtype))


def hash_parameters(params: Any) -> str:
    """Hash paths, types and values of all leaves, selected or not."""
    digest = hashlib.sha256()
    for path, leaf in paths_and_leaves(params):
        digest.update(f"{path}\n".encode())
        if dtype_of(leaf) is not None:
            _update(digest, leaf)
        else:
            # The address in the text of a function differs from process to process.
            plain = leaf is None or isinstance(leaf, (str, bytes, int))
            name = getattr(leaf, "__qualname__", type(leaf).__qualname__)
            digest.update(f"{kind_of(leaf)} {leaf if plain else name}\n".encode())
    return digest.hexdigest()


def _update(digest: Any, leaf: Any) -> None:
    """Add type, shape and bytes of an array."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    digest.update(f"{array.dtype.name} {array.shape}\n".encode())
    digest.update(np.ascontiguousarray(native(array)).reshape(-1).view(np.uint8))


def hash_constants(jaxpr: ClosedJaxpr) -> str:
    """Hash the arrays that a jaxpr closes over, wherever they hang."""
    known: dict[int, bytes] = {}  # of each inner jaxpr, which may be shared by many equations

    def hash_of(value: Any) -> bytes:
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            if id(value) not in known:
                known[id(value)] = b"".join(hash_of(part) for part in _parts(value))
            inner = known[id(value)]
            return hashlib.sha256(inner).digest() if inner else b""
        if isinstance(value, (dict, list, tuple)):
            return b"".join(hash_of(part) for part in (value.values() if isinstance(value, dict) else value))
        if not hasattr(value, "__array__") or isinstance(value, type):
            return b""
        array = hashlib.sha256()
        _update(array, value)
        return array.digest()

    return hashlib.sha256(hash_of(jaxpr)).hexdigest()


def _parts(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[Any]:
    """What may hold arrays in a jaxpr; newer JAX has one class for closed and open ones."""
    yield from getattr(jaxpr, "consts", ())
    body = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in body.eqns:
        yield from _literal_arrays(equation.invars)
        yield from (equation.params[name] for name in sorted(equation.params))
    yield from _literal_arrays(body.outvars)


def _literal_arrays(variables: Sequence[Any]) -> Iterator[Any]:
    """Array-valued literals; the text of a jaxpr holds the values of scalar ones and counts as the function's."""
    return (variable.val for variable in variables if isinstance(variable, Literal) and np.ndim(variable.val))

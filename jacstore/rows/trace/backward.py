"""Trace the backward pass of one example into one flat list of equations, and evaluate it.

Wrapping calls such as `jit`, `remat` and custom derivatives are inlined, so that the equations that form a gradient can
be seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from jacstore.rows.trace import scans

CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
}


class Backward:
    """The backward pass of one example as one list of equations.

    Parameters
    ----------
    traced
        The program as `fingerprint.backward` traces it, gradients of leaves being its outputs but the first.
    n_parameters
        How many of its arguments, the first ones, are parameters; the last one is the cotangent.
    """

    def __init__(self, traced: jex.ClosedJaxpr, n_parameters: int) -> None:
        leaves = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in traced.jaxpr.invars]
        self.closed = jax.make_jaxpr(lambda *flat: _evaluate(traced.jaxpr, traced.consts, flat, open_scans=True))(
            *leaves
        )
        jaxpr = self.closed.jaxpr
        self.outputs, self.gradients = [jaxpr.outvars[0]], jaxpr.outvars[1:]
        self.producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self._of_data = jaxpr.invars[n_parameters:]
        self._examples, self._cotangents = self._reached(self._of_data[:-1]), self._reached(self._of_data[-1:])

    def _reached(self, start: Sequence[Any]) -> set[Any]:
        reached = set(start)
        for eqn in self.closed.jaxpr.eqns:
            flags = [not isinstance(v, jex.Literal) and v in reached for v in eqn.invars]
            if eqn.primitive.name == "scan":
                outputs = scans.reached(eqn, flags)
                reached.update(v for v, flag in zip(eqn.outvars, outputs, strict=True) if flag)
            elif any(flags):
                reached.update(eqn.outvars)
        return reached

    def of_cotangent(self, var: Any) -> bool:
        return not isinstance(var, jex.Literal) and var in self._cotangents

    def of_example(self, var: Any) -> bool:
        return not isinstance(var, jex.Literal) and var in self._examples

    def values(self, selected: Any, rest: Any, example: Any, cotangent: Any, wanted: Sequence[Any]) -> list[Any]:
        """Evaluate variables; only equations that they depend on are run."""
        arguments = jax.tree_util.tree_leaves((selected, rest, example, cotangent))
        return _evaluate(self.closed.jaxpr, self.closed.consts, arguments, wanted)

    def constants(self, var: Any, parameters: Sequence[Any]) -> np.ndarray:
        """The values of an array, or of a scalar, that depends on parameters alone."""
        others = [np.zeros(v.aval.shape, v.aval.dtype) for v in self._of_data]
        found = _evaluate(self.closed.jaxpr, self.closed.consts, [*parameters, *others], [var])
        return np.asarray(found[0])


def hash_values(values: np.ndarray) -> str:
    """Hash of the bytes of an array: equal ones are equal to the bit, NaN and the sign of zero included."""
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def _inner(eqn: Any) -> Any:
    """The jaxpr that a call only wraps, closed, or None."""
    if eqn.primitive.name not in CALLS:
        return None
    for value in eqn.params.values():
        if isinstance(value, jex.ClosedJaxpr):
            return value
        if isinstance(value, jex.Jaxpr):
            return jex.ClosedJaxpr(value, ())
    return None


def _evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    arguments: Sequence[Any],
    wanted: Sequence[Any] | None = None,
    open_scans: bool = False,
    known: dict[Any, Any] | None = None,
) -> Any:
    """Run a jaxpr with its wrapping calls opened; with `wanted`, only what these variables need.

    With `open_scans`, products inside of scans are taken out of them. What is computed twice in the same way is one
    variable, such as the joined cotangents of gates whose two products are each split: leaves share what is stored.
    """
    known = {} if known is None else known
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
    targets = jaxpr.outvars if wanted is None else wanted
    needed = {v for v in targets if not isinstance(v, jex.Literal)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            live.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, jex.Literal))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, jex.Literal) else values[var]

    for eqn in reversed(live):
        inputs, inner = [read(v) for v in eqn.invars], _inner(eqn)
        if inner is not None:
            results = _evaluate(inner.jaxpr, inner.consts, inputs, open_scans=open_scans, known=known)
        elif open_scans and (opened := _opened(eqn, inputs)) is not None:
            results = opened
        else:
            results = _bound(eqn, inputs, known)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in targets]


def _bound(eqn: Any, inputs: Sequence[Any], known: dict[Any, Any]) -> list[Any]:
    """Outputs of an equation that stands for itself, or those of an equal one before."""
    key = _same(eqn, inputs)
    if key is None or key not in known:
        results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
        results = results if eqn.primitive.multiple_results else [results]
        if key is None:
            return list(results)
        # Inputs are kept as well, for they are told apart by their addresses.
        known[key] = results, inputs
    return list(known[key][0])


def _same(eqn: Any, inputs: Sequence[Any]) -> Any:
    """What two equations share that compute the same; None where that cannot be said."""
    given = tuple(
        (var.aval, np.asarray(var.val).tobytes()) if isinstance(var, jex.Literal) else id(value)
        for var, value in zip(eqn.invars, inputs, strict=True)
    )
    key = eqn.primitive, given, tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
    try:
        hash(key)
    except TypeError:
        return None
    return None if eqn.effects else key


def _opened(eqn: Any, inputs: Sequence[Any]) -> list[Any] | None:
    """Outputs of a scan whose products stand behind it; None if it is no scan or holds none."""
    if eqn.primitive.name != "scan":
        return None
    inner = eqn.params["jaxpr"]
    arguments = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inner.jaxpr.invars]
    body = jax.make_jaxpr(lambda *given: _evaluate(inner.jaxpr, inner.consts, given, open_scans=True))(*arguments)
    scan = scans.Scan(eqn, body)
    plan = scan.plan()
    return scan.run(plan, inputs, _evaluate) if plan.products else None

"""Take products out of scans: the steps become positions, or groups, of one product.

The backward pass of a recurrent layer adds `a_t ⊗ d_t` to the gradient of a weight at every step of a scan; that of
scanned layers stacks one such product per layer. Both are rewritten so that the scan only returns the operands of all
steps, `(T, ...)`, and one product follows it, which contracts the steps or keeps them as a batch axis. The values are
the same, and what forms the gradient then stands where it can be followed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

# Operands of all steps may take this many times the numbers of the sum that they replace.
STACKED = 8
MOVES = ("transpose", "reshape", "squeeze", "expand_dims", "convert_element_type", "neg", "copy")

# Linear steps of one operand; others of `mul`, `div` and `pad` are numbers that stand in the program.
PARTS = ("slice", "split", "rev", "reduce_sum", "mul", "div", "pad")

LOOKUPS = ("scatter-add", "scatter_add", "dynamic_update_slice")

Evaluate = Callable[..., list[Any]]


@dataclass(kw_only=True)
class _Step:
    """A linear step behind a product: its equation, which operand moves, which output is meant."""

    eqn: Any
    operand: int = 0
    output: int = 0

    @property
    def moving(self) -> Any:
        return self.eqn.invars[self.operand]

    def __call__(self, value: Any) -> Any:
        given = [value if n == self.operand else v.val for n, v in enumerate(self.eqn.invars)]
        found = self.eqn.primitive.bind(*given, **self.eqn.primitive.get_bind_params(self.eqn.params))
        return found[self.output] if self.eqn.primitive.multiple_results else found


@dataclass(kw_only=True)
class _Taken:
    """A product that is taken out of a scan: its equation and what follows it, from the product on."""

    eqn: Any
    after: list[_Step]


@dataclass(kw_only=True)
class _Plan:
    """What replaces the outputs of a scan.

    Attributes
    ----------
    sums
        For a carry that only adds up: the products that are added to it.
    plain
        The variables that are added to it as they are, and also stacked for a product.
    stacked
        For an output of every step that is a product.
    """

    sums: dict[int, list[_Taken]] = field(default_factory=dict)
    plain: dict[int, list[Any]] = field(default_factory=dict)
    stacked: dict[int, _Taken] = field(default_factory=dict)

    @property
    def products(self) -> list[_Taken]:
        return [*(taken for each in self.sums.values() for taken in each), *self.stacked.values()]


class Scan:
    """A scan of a flat body: `carry, y = body(consts, carry, x)`."""

    def __init__(self, eqn: Any, body: Any) -> None:
        self.params, self.body = eqn.params, body
        self.n_consts, self.n_carry = eqn.params["num_consts"], eqn.params["num_carry"]
        jaxpr = body.jaxpr
        self.carry_in = jaxpr.invars[self.n_consts : self.n_consts + self.n_carry]
        self.xs = jaxpr.invars[self.n_consts + self.n_carry :]
        self.carry_out, self.ys = jaxpr.outvars[: self.n_carry], jaxpr.outvars[self.n_carry :]
        self.producer = {v: e for e in jaxpr.eqns for v in e.outvars}
        self.uses: dict[Any, int] = {}
        for var in [v for e in jaxpr.eqns for v in e.invars] + list(jaxpr.outvars):
            if not isinstance(var, jex.Literal):
                self.uses[var] = self.uses.get(var, 0) + 1

    def plan(self) -> _Plan:
        """Which carries and outputs are products that can be taken out."""
        plan = _Plan()
        added: dict[int, list[Any]] = {}
        for n, (before, after) in enumerate(zip(self.carry_in, self.carry_out, strict=True)):
            parts = self._addends(before, after)
            if parts is None:
                continue
            taken = [self._product(part, sums=True) for part in parts]
            if taken and all(taken):
                plan.sums[n] = [one for one in taken if one]
            else:
                added[n] = parts
        for n, var in enumerate(self.ys):
            if (one := self._product(var, sums=False)) is not None:
                plan.stacked[n] = one
        # Sums of cotangents, such as biases, follow the products whose operands they are.
        held = {v for taken in plan.products for v in _operands(taken.eqn)}
        for n, parts in added.items():
            if parts and all(not isinstance(part, jex.Literal) and self._root(part) in held for part in parts):
                plan.plain[n] = parts
        return plan

    def _addends(self, before: Any, after: Any) -> list[Any] | None:
        """The terms that a step adds to a carry that nothing else reads; None if the step does more than add."""
        if isinstance(after, jex.Literal) or self.uses.get(before) != 1:
            return None
        parts, todo, found = [], [after], False
        while todo:
            var = todo.pop()
            if var is before:
                found = True
                continue
            eqn = None if isinstance(var, jex.Literal) else self.producer.get(var)
            if eqn is not None and eqn.primitive.name in ("add", "add_any") and self._contains(eqn, before):
                # A running sum that a step also returns or reads must stay in the carry.
                if self.uses[var] != 1:
                    return None
                todo += eqn.invars
            else:
                parts.append(var)
        same = all(part.aval.shape == before.aval.shape for part in parts)
        return parts if found and same else None

    def _contains(self, eqn: Any, before: Any) -> bool:
        """Whether the carry is in a tree of additions."""
        for var in eqn.invars:
            if var is before:
                return True
            made = None if isinstance(var, jex.Literal) else self.producer.get(var)
            if made is not None and made.primitive.name in ("add", "add_any") and self._contains(made, before):
                return True
        return False

    def _product(self, var: Any, sums: bool) -> _Taken | None:
        """The product whose numbers a variable only moves, if it may be taken out."""
        after: list[_Step] = []
        while True:
            if isinstance(var, jex.Literal) or (eqn := self.producer.get(var)) is None:
                return None
            name = eqn.primitive.name
            if name == "dot_general":
                break
            if name in LOOKUPS:
                if not sums or not self._zeros(eqn.invars[0]) or not _along_one_axis(eqn):
                    return None
                break
            zeros = [self._zeros(v) for v in eqn.invars] if name in ("add", "add_any") else []
            if any(zeros):
                # The initial value of an inner scan's sum.
                var = eqn.invars[zeros.index(True) - 1]
                continue
            if (step := _step(eqn, var)) is None:
                return None
            after.insert(0, step)
            var = step.moving
        numbers = self.params["length"] * sum(math.prod(v.aval.shape) for v in _operands(eqn))
        size = math.prod(eqn.outvars[0].aval.shape) * (1 if sums else self.params["length"])
        return _Taken(eqn=eqn, after=after) if numbers <= STACKED * size else None

    def _zeros(self, var: Any) -> bool:
        if isinstance(var, jex.Literal):
            return not np.any(np.asarray(var.val))
        eqn = self.producer.get(var)
        return eqn is not None and eqn.primitive.name == "broadcast_in_dim" and self._zeros(eqn.invars[0])

    def _root(self, var: Any) -> Any:
        while not isinstance(var, jex.Literal) and (eqn := self.producer.get(var)) is not None and _moves(eqn):
            var = eqn.invars[0]
        return var

    # ----------------------------------------------------------------------------------------------- the scan without

    def run(self, plan: _Plan, inputs: Sequence[Any], evaluate: Evaluate) -> list[Any]:
        """Values of all outputs of the scan."""
        consts, rest = list(inputs[: self.n_consts]), list(inputs[self.n_consts :])
        init, xs = rest[: self.n_carry], rest[self.n_carry :]
        given = dict(zip(self.xs, xs, strict=True))
        gone = {*plan.sums, *plan.plain}
        kept_carry = [n for n in range(self.n_carry) if n not in gone]
        kept_ys = [n for n in range(len(self.ys)) if n not in plan.stacked]
        operands = {v for taken in plan.products for v in _operands(taken.eqn)}
        operands |= {self._root(part) for parts in plan.plain.values() for part in parts}
        # Inputs of the steps, and values that they return already, need not be returned again.
        outer = dict(given)
        returned = [v for v in dict.fromkeys(_ordered(operands, self.body)) if v not in outer]
        wanted = [*(self.carry_out[n] for n in kept_carry), *(self.ys[n] for n in kept_ys)]
        extra = [v for v in returned if all(v is not self.ys[n] for n in kept_ys)]

        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            # Nothing that is asked for reads an accumulator that was taken out.
            whole = dict(zip(kept_carry, carry, strict=True))
            carried = [whole.get(n, init[n]) for n in range(self.n_carry)]
            found = evaluate(self.body.jaxpr, self.body.consts, [*consts, *carried, *x], [*wanted, *extra])
            return found[: len(kept_carry)], found[len(kept_carry) :]

        last, ys = lax.scan(
            step,
            [init[n] for n in kept_carry],
            xs,
            length=self.params["length"],
            reverse=self.params["reverse"],
            unroll=self.params["unroll"],
        )
        outer.update(zip(extra, ys[len(kept_ys) :], strict=True))
        own = [(self.ys[n], value) for n, value in zip(kept_ys, ys, strict=False)]
        outer.update((v, value) for v, value in own if not isinstance(v, jex.Literal) and v in operands)
        carried = dict(zip(kept_carry, last, strict=True))
        for n, products in plan.sums.items():
            carried[n] = init[n]
            for taken in products:
                carried[n] = carried[n] + _moved(taken, _summed(taken.eqn, outer))
        for n, parts in plan.plain.items():
            carried[n] = init[n]
            for part in parts:
                carried[n] = carried[n] + self._moved_sum(part, outer)
        stacked = dict(zip(kept_ys, ys, strict=False))
        for n, taken in plan.stacked.items():
            stacked[n] = jax.vmap(lambda value, taken=taken: _moved(taken, value))(_batched(taken.eqn, outer))
        return [carried[n] for n in range(self.n_carry)] + [stacked[n] for n in range(len(self.ys))]

    def _moved_sum(self, part: Any, outer: dict[Any, Any]) -> Any:
        """The sum over all steps of a variable that is a moved form of an operand."""
        after: list[_Step] = []
        while part not in outer:
            after.insert(0, _Step(eqn=self.producer[part]))
            part = after[0].moving
        return _follow(after, outer[part].sum(0))


def reached(eqn: Any, flags: Sequence[bool]) -> list[bool]:
    """Which outputs of a scan depend on the inputs that are flagged."""
    body, params = eqn.params["jaxpr"].jaxpr, eqn.params
    n_consts, n_carry = params["num_consts"], params["num_carry"]
    carry = list(flags[n_consts : n_consts + n_carry])
    while True:
        whole = [*flags[:n_consts], *carry, *flags[n_consts + n_carry :]]
        marked = {v for v, flag in zip(body.invars, whole, strict=True) if flag}
        for inner in body.eqns:
            if any(not isinstance(v, jex.Literal) and v in marked for v in inner.invars):
                marked.update(inner.outvars)
        found = [not isinstance(v, jex.Literal) and v in marked for v in body.outvars]
        after = [a or b for a, b in zip(carry, found, strict=False)]
        if after == carry:
            return [*after, *found[n_carry:]]
        carry = after


def _moves(eqn: Any) -> bool:
    """Whether an equation only moves, casts or negates real numbers."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim":
        return math.prod(eqn.invars[0].aval.shape) == math.prod(eqn.outvars[0].aval.shape)
    real = all(not jnp.issubdtype(v.aval.dtype, jnp.complexfloating) for v in eqn.invars)
    return name in MOVES and real


def _step(eqn: Any, var: Any) -> _Step | None:
    """The linear step that gives `var` of one other variable, if it is one that can be done behind a scan as well."""
    name = eqn.primitive.name
    if _moves(eqn):
        return _Step(eqn=eqn)
    variables = [n for n, v in enumerate(eqn.invars) if not isinstance(v, jex.Literal)]
    real = all(not jnp.issubdtype(v.aval.dtype, jnp.complexfloating) for v in eqn.invars)
    if name not in PARTS or not real or len(variables) != 1:
        return None
    if name in ("div", "pad") and (variables != [0] or (name == "pad" and np.any(np.asarray(eqn.invars[1].val)))):
        return None
    return _Step(eqn=eqn, operand=variables[0], output=eqn.outvars.index(var))


def _operands(eqn: Any) -> list[Any]:
    """The variables that a product is formed from: factors, or indices and cotangents."""
    given = eqn.invars
    if eqn.primitive.name == "dynamic_update_slice":
        given = [eqn.invars[2 + _updated_axis(eqn)], eqn.invars[1]]
    elif eqn.primitive.name in LOOKUPS:
        given = eqn.invars[1:]
    return [v for v in given if not isinstance(v, jex.Literal)]


def _along_one_axis(eqn: Any) -> bool:
    """Whether a look-up's gradient can be written for all steps at once."""
    if eqn.primitive.name == "dynamic_update_slice":
        updated = [a != b for a, b in zip(eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, strict=True)]
        return sum(updated) == 1 and len(_operands(eqn)) == 2 and eqn.invars[1].aval.shape[updated.index(True)] == 1
    return not getattr(eqn.params["dimension_numbers"], "operand_batching_dims", ())


def _updated_axis(eqn: Any) -> int:
    shapes = zip(eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, strict=True)
    return next((axis for axis, (a, b) in enumerate(shapes) if a != b), 0)


def _ordered(wanted: set[Any], body: Any) -> list[Any]:
    """Variables in the order of the program, whatever the order of a set."""
    jaxpr = body.jaxpr
    every = [*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    return [v for v in every if v in wanted]


def _value(var: Any, outer: dict[Any, Any], length: int) -> Any:
    if isinstance(var, jex.Literal):
        return jnp.broadcast_to(var.val, (length, *jnp.shape(var.val)))
    return outer[var]


def _stack(eqn: Any, outer: dict[Any, Any]) -> list[Any]:
    length = next(len(outer[v]) for v in eqn.invars if v in outer)
    return [_value(v, outer, length) for v in eqn.invars[-2:]]


def _summed(eqn: Any, outer: dict[Any, Any]) -> Any:
    """The sum of a product over all steps, as one product."""
    if eqn.primitive.name == "dot_general":
        return _dot(eqn, outer, batch=False)
    ids, updates = (outer[v] for v in _operands(eqn))
    if eqn.primitive.name == "dynamic_update_slice":
        axis, mode = _updated_axis(eqn), lax.GatherScatterMode.CLIP
        ids, updates = ids[:, None], updates.squeeze(axis + 1)
        windows, inserted, targets = tuple(range(1, updates.ndim)), (axis,), (axis,)
    else:
        numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
        windows = tuple(axis + 1 for axis in numbers.update_window_dims)
        inserted, targets = numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=windows, inserted_window_dims=inserted, scatter_dims_to_operand_dims=targets
    )
    table = jnp.zeros(eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype)
    return lax.scatter_add(table, ids, updates, numbers, mode=mode)


def _batched(eqn: Any, outer: dict[Any, Any]) -> Any:
    """The products of all steps, `(T, ...)`, as one product."""
    return _dot(eqn, outer, batch=True)


def _dot(eqn: Any, outer: dict[Any, Any], batch: bool) -> Any:
    left, right = _stack(eqn, outer)
    shifted = [[[axis + 1 for axis in side] for side in pair] for pair in eqn.params["dimension_numbers"]]
    for side in shifted[batch]:
        side.insert(0, 0)
    (a, b), (c, d) = shifted
    return lax.dot_general(
        left,
        right,
        ((a, b), (c, d)),
        precision=eqn.params["precision"],
        preferred_element_type=eqn.params["preferred_element_type"],
    )


def _moved(taken: _Taken, value: Any) -> Any:
    return _follow(taken.after, value)


def _follow(steps: Sequence[_Step], value: Any) -> Any:
    for step in steps:
        value = step(value)
    return value

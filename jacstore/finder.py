"""In: a flat backward pass. Out: for every parameter leaf the products, look-ups or sums of cotangents that form it.

A gradient is followed back through steps that only move or scale numbers. Sums of cotangents, such as biases, are tied
to the cotangents of the layer they belong to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.extend.core as jex
import numpy as np

from jacstore.backward import Backward
from jacstore.cores import MAX_MAP, Core, Made, pairable
from jacstore.terms import Views

PRODUCTS = ("dot_general", "conv_general_dilated", "scatter-add", "scatter_add")


@dataclass(kw_only=True)
class Found:
    """The cores of a leaf, or why there are none; a sum of cotangents is pending until its layer is known."""

    terms: list[Core] = field(default_factory=list)
    why: str = ""
    pending: list[tuple[Any, float, Views]] = field(default_factory=list)


class _Stop(Exception):
    """A gradient cannot be followed further; the text says why."""


class Finder:
    """Follows gradients back to the equations that form them."""

    def __init__(self, flat: Backward) -> None:
        self.flat = flat
        self.layers = {root for eqn in flat.closed.jaxpr.eqns if (root := self._layer(eqn)) is not None}

    def _layer(self, eqn: Any) -> Any:
        """The cotangent of a layer, if an equation is a product of it and of the layer's input."""
        if eqn.primitive.name not in PRODUCTS:
            return None
        operands = [v for v in eqn.invars if self.flat.of_cotangent(v)]
        if len(operands) != 1 or not any(self.flat.of_example(v) for v in eqn.invars if v is not operands[0]):
            return None
        return self._rooted(operands[0])[0]

    def leaf(self, n: int) -> Found:
        found = Found()
        gradient = self.flat.gradients[n]
        try:
            self._follow(gradient, (), 1.0, found)
            if found.terms and found.pending:
                raise _Stop("a product and a sum of cotangents")
            if not pairable(found.terms):
                raise _Stop("terms of unlike kinds")
            return found
        except _Stop as stop:
            return Found(why=str(stop))

    def _follow(self, var: Any, views: Views, scale: float, found: Found) -> None:
        """Add the cores of `scale * viewed(var)`."""
        flat = self.flat
        if isinstance(var, jex.Literal) or not flat.of_cotangent(var):
            if _is_zero(flat, var):
                return
            raise _Stop("a gradient that does not depend on the outputs")
        eqn = flat.producer.get(var)
        if eqn is None or var in self.layers:
            found.pending.append((var, scale, views))
            return
        name, operand = eqn.primitive.name, eqn.invars[0]
        shape = tuple(var.aval.shape)
        if _is_move(eqn):
            self._follow(operand, (*_as_views(eqn), *views), scale, found)
        elif name in ("copy", "copy_p", "optimization_barrier", "convert_element_type"):
            self._follow(eqn.invars[eqn.outvars.index(var)], views, scale, found)
        elif name == "neg":
            self._follow(operand, views, -scale, found)
        elif name in ("add", "add_any"):
            for part in eqn.invars:
                if tuple(part.aval.shape) != shape:
                    raise _Stop("a broadcast sum")
                self._follow(part, views, scale, found)
        elif name in ("mul", "div") and (factor := self._factor(eqn)) is not None:
            value, part = factor
            self._follow(part, views, scale / value if name == "div" else scale * value, found)
        elif name == "reduce_sum":
            self._follow(operand, (("sum", tuple(eqn.params["axes"])), *views), scale, found)
        elif name in PRODUCTS and self._layer(eqn) is not None:
            found.terms.append(self._product(eqn, views, scale))
            if name.startswith("scatter"):
                self._follow(operand, views, scale, found)
        elif name in ("scan", "while", "cond"):
            raise _Stop(f"inside {name}")
        else:
            found.pending.append((var, scale, views))

    def _product(self, eqn: Any, views: Views, scale: float) -> Core:
        name = eqn.primitive.name
        summed: tuple[int, ...] = ()
        if name == "dot_general" and views and views[0][0] == "sum":
            # A weight shared by a batch of products: the batch is more positions.
            batch = range(len(eqn.params["dimension_numbers"][1][0]))
            if set(views[0][1]) <= set(batch):
                summed, views = views[0][1], views[1:]
        if any(kind == "sum" for kind, _ in views):
            raise _Stop("a sum of products")
        if name == "dot_general":
            return self._dot(eqn, summed, views, scale)
        return self._conv(eqn, views, scale) if name.startswith("conv") else self._index(eqn, views, scale)

    def _factor(self, eqn: Any) -> tuple[float, Any] | None:
        """A scalar of `mul` or `div` that depends on parameters alone, and the other operand."""
        left, right = eqn.invars
        if eqn.primitive.name == "mul" and self.flat.of_cotangent(right):
            left, right = right, left
        if not self.flat.of_cotangent(left) or self.flat.of_cotangent(right) or self.flat.of_example(right):
            return None
        if left.aval.shape != eqn.outvars[0].aval.shape:
            return None
        scalar = right
        while not isinstance(scalar, jex.Literal) and scalar.aval.shape != () and scalar in self.flat.producer:
            made = self.flat.producer[scalar]
            if made.primitive.name not in ("broadcast_in_dim", "convert_element_type", "reshape"):
                return None
            scalar = made.invars[0]
        if isinstance(scalar, jex.Literal):
            value = float(np.asarray(scalar.val)) if np.ndim(scalar.val) == 0 else math.nan
        elif math.prod(scalar.aval.shape) == 1:
            value = self.flat.constant(scalar)
        else:
            return None
        return (value, left) if math.isfinite(value) and value else None

    def _rooted(self, var: Any) -> tuple[Any, tuple[tuple[str, Any], ...]]:
        """The variable that `var` is only a moved form of, and the moves."""
        steps: tuple[tuple[str, Any], ...] = ()
        while not isinstance(var, jex.Literal) and (eqn := self.flat.producer.get(var)) is not None and _is_move(eqn):
            steps = (*_as_views(eqn), *steps)
            var = eqn.invars[0]
        return var, steps

    def _made(self, var: Any, steps: tuple[tuple[str, Any], ...], role: str, shape: Sequence[int], **more: Any) -> Made:
        root, before = self._rooted(var)
        return Made(root=root, steps=(*before, *steps), role=role, shape=tuple(map(int, shape)), **more)

    def _sides(self, eqn: Any) -> bool:
        """Whether the cotangent is the right operand; exactly one side may depend on it."""
        left, right = (self.flat.of_cotangent(v) for v in eqn.invars[:2])
        if left == right:
            raise _Stop("a product of two cotangents" if left else "a product without cotangents")
        return right

    def _dot(self, eqn: Any, summed: tuple[int, ...], views: Views, scale: float) -> Core:
        contract, batch = eqn.params["dimension_numbers"]
        swapped = not self._sides(eqn)
        operands, made = [], []
        for side, var in enumerate(eqn.invars[:2]):
            shape = var.aval.shape
            groups = [axis for n, axis in enumerate(batch[side]) if n not in summed]
            times = [axis for n, axis in enumerate(batch[side]) if n in summed] + list(contract[side])
            free = [axis for axis in range(len(shape)) if axis not in (*batch[side], *contract[side])]
            sizes = [[shape[axis] for axis in part] for part in (groups, times, free)]
            operands.append(sizes)
            steps = (("transpose", (*groups, *times, *free)),)
            made.append((var, steps, [math.prod(part) for part in sizes]))
        a, d = (made[1], made[0]) if swapped else made
        group, free_a, free_d = operands[0][0], operands[swapped][2], operands[not swapped][2]
        whole = (*group, *free_a, *free_d)
        moves: Views = (("reshape", tuple(map(int, whole))),)
        if swapped:
            # The product had the cotangent's axes first.
            g, n = len(group), len(free_a)
            moves += (("transpose", (*range(g), *range(g + n, len(whole)), *range(g, g + n))),)
        return Core(
            kind="dot",
            inputs=self._made(a[0], a[1], "inputs", a[2]),
            cotangents=self._made(d[0], d[1], "cotangents", d[2]),
            scale=scale,
            views=_tidy((*moves, *views)),
        )

    def _conv(self, eqn: Any, views: Views, scale: float) -> Core:
        if not self._sides(eqn):
            raise _Stop("a convolution with the cotangent as image")
        p = eqn.params
        if p["feature_group_count"] != 1:
            raise _Stop("a convolution with feature groups in its gradient")
        lhs, rhs, out = (tuple(s) for s in p["dimension_numbers"])
        image, cotangent = eqn.invars[:2]
        # In a filter's gradient channels stand at the batch axis, and the batch is what is summed over.
        image_axes = (lhs[1], *lhs[2:], lhs[0])
        space = tuple(cotangent.aval.shape[axis] for axis in rhs[2:])
        images = tuple(image.aval.shape[axis] for axis in image_axes)
        made_d = (rhs[1], *rhs[2:], rhs[0])
        batch, width = images[0], cotangent.aval.shape[rhs[0]]
        window = tuple(eqn.outvars[0].aval.shape[axis] for axis in out[2:])
        groups = int(p["batch_group_count"])
        channels = images[-1] // groups
        # From `(*window, channels, width)` to the equation's own order.
        spatial = len(window)
        order = [0] * (spatial + 2)
        for position, axis in enumerate(out[2:]):
            order[axis] = position
        order[out[0]], order[out[1]] = spatial, spatial + 1
        moves: Views = (("reshape", (*map(int, window), int(channels), int(width))), ("transpose", tuple(order)))
        return Core(
            kind="conv",
            inputs=self._made(image, (("transpose", image_axes),), "inputs", images),
            cotangents=self._made(
                cotangent, (("transpose", made_d),), "cotangents", (1, batch * math.prod(space), width)
            ),
            scale=scale,
            views=_tidy((*moves, *views)),
            geometry={
                "window": tuple(map(int, window)),
                "positions": tuple(map(int, space)),
                "strides": tuple(map(int, p["rhs_dilation"])),
                "dilation": tuple(map(int, p["window_strides"])),
                "padding": tuple(int(low) for low, _ in p["padding"]),
                "spread": tuple(map(int, p["lhs_dilation"])),
                "groups": groups,
            },
        )

    def _index(self, eqn: Any, views: Views, scale: float) -> Core:
        table, ids, updates = eqn.invars
        numbers, p = eqn.params["dimension_numbers"], eqn.params
        shape = table.aval.shape
        plain = (
            tuple(numbers.inserted_window_dims) == (0,)
            and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
            and not getattr(numbers, "operand_batching_dims", ())
            and ids.aval.shape[-1:] == (1,)
        )
        lookups = ids.aval.ndim - 1
        window = tuple(range(lookups, updates.aval.ndim))
        if not plain or tuple(numbers.update_window_dims) != window or updates.aval.shape[lookups:] != shape[1:]:
            raise _Stop("a look-up that is not along the first axis")
        if self.flat.of_cotangent(ids) or not self.flat.of_cotangent(updates):
            raise _Stop("a scatter of something else than cotangents")
        count, width = math.prod(ids.aval.shape), math.prod(shape[1:])
        clip = "CLIP" in str(p.get("mode")).upper()
        return Core(
            kind="index",
            inputs=self._made(ids, (), "ids", (count,), size=int(shape[0]), clip=clip),
            cotangents=self._made(updates, (), "cotangents", (1, count, width)),
            scale=scale,
            views=_tidy((("reshape", tuple(map(int, shape))), *views)),
            geometry={"size": int(shape[0])},
        )

    def tie_sums(self, found: list[Found]) -> None:
        """Tie sums of cotangents, such as biases, to the cotangents of the layer they belong to."""
        layers: dict[Any, list[Made]] = {}
        for leaf in found:
            for core in leaf.terms:
                layers.setdefault(core.cotangents.root, []).append(core.cotangents)
        for leaf in found:
            if not leaf.pending:
                continue
            try:
                tied = [self._tied(layers, *pending) for pending in leaf.pending]
                # Products of sums go group by group, and their rows channel by channel.
                if len({(core.cotangents.shape[0], core.cotangents.shape[2]) for core in tied}) > 1:
                    raise _Stop("layers that group its entries in unlike ways")
                leaf.terms = tied
            except _Stop as stop:
                leaf.why = str(stop)

    def _tied(self, layers: dict[Any, list[Made]], var: Any, scale: float, views: Views) -> Core:
        root, steps = self._rooted(var)
        if root not in layers:
            raise _Stop("no product with stored factors")
        shape = tuple(root.aval.shape)
        if math.prod(shape) > MAX_MAP:
            raise _Stop("cotangents too large to compare")
        entries = _summed(shape, (*steps, *views))
        for made in layers[root]:
            g, t, d = made.shape
            stored = _summed(shape, (*made.steps, ("reshape", (g, t, d)), ("sum", (1,))))
            if stored.shape == entries.shape and np.array_equal(stored, entries):
                return Core(kind="dot", inputs=None, cotangents=made, scale=scale, views=())
        raise _Stop("a sum over other axes than its layer's")


def _summed(shape: tuple[int, ...], steps: Sequence[tuple[str, Any]]) -> np.ndarray:
    """Which numbers of an array are summed in each entry of its moved and summed form, `(summands, entries)` sorted."""
    order = np.arange(math.prod(shape), dtype=np.int32).reshape(1, *shape)
    for kind, numbers in steps:
        if kind == "sum":
            kept = [axis + 1 for axis in range(order.ndim - 1) if axis not in numbers]
            order = order.transpose(0, *(axis + 1 for axis in numbers), *kept)
            order = order.reshape(-1, *order.shape[1 + len(numbers) :])
        elif kind == "reshape":
            order = order.reshape(len(order), *numbers)
        else:
            order = order.transpose(0, *(axis + 1 for axis in numbers))
    return np.sort(order.reshape(len(order), -1), 0)


def _is_move(eqn: Any) -> bool:
    """Whether an equation only moves numbers."""
    name = eqn.primitive.name
    if name in ("transpose", "reshape", "squeeze", "expand_dims"):
        return True
    return name == "broadcast_in_dim" and math.prod(eqn.invars[0].aval.shape) == math.prod(eqn.outvars[0].aval.shape)


def _as_views(eqn: Any) -> Views:
    if eqn.primitive.name == "transpose":
        return (("transpose", tuple(int(axis) for axis in eqn.params["permutation"])),)
    return (("reshape", tuple(int(n) for n in eqn.outvars[0].aval.shape)),)


def _is_zero(flat: Backward, var: Any) -> bool:
    """Whether a variable is zeros, as the base of a scatter is."""
    if isinstance(var, jex.Literal):
        return not np.any(np.asarray(var.val))
    eqn = flat.producer.get(var)
    return eqn is not None and eqn.primitive.name == "broadcast_in_dim" and _is_zero(flat, eqn.invars[0])


def _tidy(views: Views) -> Views:
    """Without moves that change nothing: a run of reshapes or transposes is one, the identity is none."""
    tidy: list[tuple[str, tuple[int, ...]]] = []
    for kind, moved in views:
        numbers = moved
        if tidy and tidy[-1][0] == kind:
            before = tidy.pop()[1]
            numbers = tuple(before[axis] for axis in numbers) if kind == "transpose" else numbers
        if kind == "reshape" or numbers != tuple(range(len(numbers))):
            tidy.append((kind, numbers))
    # The last reshape only gives the leaf's shape, and rows are flat.
    while tidy and tidy[-1][0] == "reshape":
        tidy.pop()
    return tuple(tidy)

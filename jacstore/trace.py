"""In: a prepared problem. Out: the terms of every parameter leaf, and the function that computes what they store.

The backward pass of one example is traced once and flattened. Each leaf's gradient is followed back through steps that
only move or scale numbers, to the equations that form it: products of a layer's input and a cotangent, scatters of
cotangents, or sums of them. The program is cut just before these; XLA then never forms the products. A gradient that
ends anywhere else, such as a weight inside `scan`, is stored as it is: always right, only larger.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jacstore.problem import Prepared, precision_context
from jacstore.terms import Conv, Dense, Dot, Factored, Index, Leaf, Operand, Term, Views, expand

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
PRODUCTS = ("dot_general", "conv_general_dilated", "scatter-add", "scatter_add")
# A convolution's factors must be this much smaller than its rows: a slab's expansion needs all positions of examples.
CONV_GAIN = 2
# Rows of smaller leaves stand side by side in one array; as factors each would take files of its own.
SMALLEST = 1024
# Index maps of cotangents larger than this are not compared; the leaf's bias is then stored as rows.
MAX_MAP = 20_000_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """A problem's backward pass, cut before the products that form its rows.

    Attributes
    ----------
    leaves
        With their terms; `Dense.start` counts columns of stored rows only.
    operands
        What factored leaves store, each once.
    """

    leaves: tuple[Leaf, ...]
    operands: tuple[Operand, ...]
    _flat: _Flat = field(repr=False)
    _made: Mapping[str, _Made] = field(repr=False)
    _rows: tuple[tuple[int, tuple[Term, ...]], ...] = field(repr=False)

    def __call__(
        self, selected: list[Any], rest: list[Any], example: Any, cotangents: Any
    ) -> tuple[Any, dict[str, Any], list[Any]]:
        """Of one example: outputs `(K,)`, operands, and rows `(k, size)` of the leaves stored as rows.

        `cotangents` is `(k, K)`; operands that are cotangents have a leading k.
        """
        flat = self._flat
        names = list(self._made)
        vectors = [n for n in names if flat.of_cotangent(self._made[n].root)]
        others = [n for n in names if n not in vectors]

        def one(cotangent: Any) -> tuple[Any, list[Any], list[Any], list[Any]]:
            roots = [self._made[n].root for n in [*others, *vectors]]
            found = flat.values(selected, rest, example, cotangent, [*flat.outputs, *roots, *self._row_roots()])
            outputs, found = found[: len(flat.outputs)], found[len(flat.outputs) :]
            made = [self._made[n].finish(v) for n, v in zip([*others, *vectors], found, strict=False)]
            return outputs[0], made[: len(others)], made[len(others) :], found[len(names) :]

        outputs, inputs, vectors_found, roots = jax.vmap(one, out_axes=(None, None, 0, 0))(cotangents)
        operands = dict(zip([*others, *vectors], [*inputs, *vectors_found], strict=True))
        return outputs, operands, self._finish_rows(operands, roots, len(cotangents))

    @property
    def cotangent_dtype(self) -> Any:
        """The type of cotangents: that of the outputs."""
        return self._flat.outputs[0].aval.dtype

    def _row_roots(self) -> list[Any]:
        return [self._flat.gradients[n] for n, terms in self._rows if not terms]

    def _finish_rows(self, operands: dict[str, Any], roots: list[Any], k: int) -> list[Any]:
        """Rows of dense leaves: a gradient as it came, or a convolution's by products of shifted images."""
        plain, rows = iter(roots), []
        for n, terms in self._rows:
            if terms:
                single = {name: operands.pop(name)[None] for name in {o for t in terms for o in t.operands}}
                rows.append(expand(terms, single, self.leaves[n].size, jnp)[0])
            else:
                rows.append(next(plain).reshape(k, -1))
        return rows


def cut_before_products(prepared: Prepared, layout: str, float64: bool) -> Cut:
    """Find the terms of every leaf and choose those that are stored.

    Parameters
    ----------
    layout
        auto: factors where they are smaller and the leaf is not tiny; dense: rows only; factored: factors wherever
        there are any.
    float64
        Whether it is computed in float64.
    """
    with precision_context(float64):
        example = jax.tree_util.tree_map(lambda leaf: leaf[0], prepared.read(0, 1))
        described = [(leaf.path, leaf.shape, leaf.dtype) for leaf in prepared.leaves]
        flat = _Flat(prepared.function, prepared.selected, prepared.rest, example)
        return _cut(flat, described, prepared.n_outputs, layout)


def _cut(flat: _Flat, described: Sequence[tuple[str, tuple[int, ...], str]], n_outputs: int, layout: str) -> Cut:
    finder = _Finder(flat)
    found = [finder.leaf(n) for n in range(len(described))]
    finder.tie_sums(found)
    chosen = _choose(found, described, n_outputs, layout)
    names: dict[Any, str] = {}
    made: dict[str, _Made] = {}
    operands: list[Operand] = []

    def name_of(core_made: _Made, stored: bool) -> str:
        if core_made.key not in names:
            names[core_made.key] = f"{core_made.role}{len(names)}"
            made[names[core_made.key]] = core_made
        name = names[core_made.key]
        if stored and all(o.name != name for o in operands):
            operands.append(Operand(name=name, role=core_made.role, shape=core_made.shape))
        return name

    leaves, rows, start, offset = [], [], 0, 0
    for n, (path, shape, dtype) in enumerate(described):
        size, terms = math.prod(shape), found[n].terms
        built: tuple[Term, ...] = ()
        if chosen[n]:
            built = tuple(core.term(name_of, stored=True) for core in terms)
        else:
            # XLA is slow at filter gradients of single examples; shifted images are multiplied instead.
            by_shifts = terms and all(core.kind == "conv" for core in terms)
            shifted = tuple(core.term(lambda m, stored: _temporary(m, names, made), stored=False) for core in terms)
            rows.append((n, shifted if by_shifts else ()))
            built = (Dense(start=start, size=size),)
            start += size
        leaves.append(Leaf(path=path, shape=tuple(shape), dtype=dtype, offset=offset, terms=built, why=found[n].why))
        offset += size
    used = {name for n, terms in rows for t in terms for name in t.operands} | {o.name for o in operands}
    made = {name: m for name, m in made.items() if name in used}
    return Cut(leaves=tuple(leaves), operands=tuple(operands), _flat=flat, _made=made, _rows=tuple(rows))


def _temporary(core_made: _Made, names: dict[Any, str], made: dict[str, _Made]) -> str:
    """A name for an operand that is needed to form rows, apart from those that are stored."""
    key = ("temporary", core_made.key)
    if key not in names:
        names[key] = f"temporary{len(names)}"
        made[names[key]] = core_made
    return names[key]


# ---------------------------------------------------------------------------------------------------- the flat program


class _Flat:
    """The backward pass of one example as one list of equations."""

    def __init__(self, function: Any, selected: list[Any], rest: list[Any], example: Any) -> None:
        def backward(selected: Any, rest: Any, example: Any, cotangent: Any) -> Any:
            outputs, pullback = jax.vjp(lambda leaves: function(leaves, rest, example), selected)
            return outputs, pullback(cotangent)[0]

        outputs = jax.eval_shape(function, selected, rest, example)
        arguments = (selected, rest, example, jnp.zeros(outputs.shape, outputs.dtype))
        traced = jax.make_jaxpr(backward)(*arguments)
        leaves = jax.tree_util.tree_leaves(arguments)
        self.closed = jax.make_jaxpr(lambda *flat: _evaluate(traced.jaxpr, traced.consts, flat))(*leaves)
        jaxpr = self.closed.jaxpr
        self.outputs, self.gradients = [jaxpr.outvars[0]], jaxpr.outvars[1:]
        self.producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        counts = [len(jax.tree_util.tree_leaves(part)) for part in arguments]
        examples = jaxpr.invars[counts[0] + counts[1] : sum(counts[:3])]
        self._examples, self._cotangents = self._reached(examples), self._reached(jaxpr.invars[sum(counts[:3]) :])
        self._parameters = (selected, rest)
        self._shape = (example, arguments[3])

    def _reached(self, start: Sequence[Any]) -> set[Any]:
        reached = set(start)
        for eqn in self.closed.jaxpr.eqns:
            if any(not isinstance(v, jex.Literal) and v in reached for v in eqn.invars):
                reached.update(eqn.outvars)
        return reached

    def of_cotangent(self, var: Any) -> bool:
        return not isinstance(var, jex.Literal) and var in self._cotangents

    def of_example(self, var: Any) -> bool:
        return not isinstance(var, jex.Literal) and var in self._examples

    def values(self, selected: Any, rest: Any, example: Any, cotangent: Any, wanted: Sequence[Any]) -> list[Any]:
        """Values of variables; only equations that they need are run."""
        arguments = jax.tree_util.tree_leaves((selected, rest, example, cotangent))
        return _evaluate(self.closed.jaxpr, self.closed.consts, arguments, wanted)

    def constant(self, var: Any) -> float:
        """The value of a scalar that depends on parameters alone."""
        example, cotangent = self._shape
        return float(self.values(*self._parameters, example, cotangent, [var])[0])


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


def _evaluate(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], wanted: Sequence[Any] | None = None) -> Any:
    """Run a jaxpr with its wrapping calls opened; with `wanted`, only what these variables need."""
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
            results = _evaluate(inner.jaxpr, inner.consts, inputs)
        else:
            results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
            results = results if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in targets]


# ------------------------------------------------------------------------------------------ what a leaf is made of


@dataclass(frozen=True, kw_only=True)
class _Made:
    """An operand: a variable of the program and how it is brought into its stored form."""

    root: Any
    steps: tuple[tuple[str, Any], ...]
    role: str
    shape: tuple[int, ...]
    size: int = 0
    clip: bool = False

    @cached_property
    def key(self) -> Any:
        """Equal for operands that are the same numbers in the same order."""
        return (self.root, self.role, self.shape, self.clip, self.size, self._order())

    def _order(self) -> Any:
        """Where each number comes from in the root, as a hash."""
        shape = self.root.aval.shape
        if math.prod(shape) > MAX_MAP:
            return self.steps
        moved = _moved(np.arange(math.prod(shape), dtype=np.int32).reshape(shape), self.steps)
        return hashlib.blake2b(moved.tobytes(), digest_size=16).digest()

    def finish(self, value: Any) -> Any:
        value = _moved(value, self.steps).reshape(self.shape)
        if self.role != "ids":
            return value
        value = value.astype(jnp.int32)
        inside = (value >= 0) & (value < self.size)
        return jnp.clip(value, 0, self.size - 1) if self.clip else jnp.where(inside, value, -1)


def _moved(value: Any, steps: Sequence[tuple[str, Any]]) -> Any:
    for kind, numbers in steps:
        value = value.reshape(numbers) if kind == "reshape" else value.transpose(numbers)
    return value


@dataclass(kw_only=True)
class _Core:
    """A product, scatter or sum at which a gradient begins."""

    kind: str
    inputs: _Made | None
    cotangents: _Made
    scale: float
    views: Views
    geometry: dict[str, Any] = field(default_factory=dict)

    def numbers(self, n_outputs: int) -> int:
        return (math.prod(self.inputs.shape) if self.inputs else 0) + n_outputs * math.prod(self.cotangents.shape)

    def term(self, name_of: Callable[[_Made, bool], str], stored: bool) -> Factored:
        cotangents = name_of(self.cotangents, stored)
        common: dict[str, Any] = {"cotangents": cotangents, "scale": self.scale, "views": self.views}
        if self.kind == "index":
            assert self.inputs is not None
            return Index(ids=name_of(self.inputs, stored), **common, **self.geometry)
        if self.kind == "conv":
            assert self.inputs is not None
            return Conv(inputs=name_of(self.inputs, stored), **common, **self.geometry)
        return Dot(inputs=None if self.inputs is None else name_of(self.inputs, stored), **common)


@dataclass(kw_only=True)
class _Found:
    """The cores of a leaf, or why there are none; a sum of cotangents is pending until its layer is known."""

    terms: list[_Core] = field(default_factory=list)
    why: str = ""
    pending: list[tuple[Any, float, Views]] = field(default_factory=list)


class _Stop(Exception):
    """A gradient cannot be followed further; the text says why."""


class _Finder:
    """Follows gradients back to the equations that form them."""

    def __init__(self, flat: _Flat) -> None:
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

    def leaf(self, n: int) -> _Found:
        found = _Found()
        gradient = self.flat.gradients[n]
        try:
            self._follow(gradient, (), 1.0, found)
            if found.terms and found.pending:
                raise _Stop("a product and a sum of cotangents")
            if not _pairable(found.terms):
                raise _Stop("terms of unlike kinds")
            return found
        except _Stop as stop:
            return _Found(why=str(stop))

    def _follow(self, var: Any, views: Views, scale: float, found: _Found) -> None:
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

    def _product(self, eqn: Any, views: Views, scale: float) -> _Core:
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

    def _made(
        self, var: Any, steps: tuple[tuple[str, Any], ...], role: str, shape: Sequence[int], **more: Any
    ) -> _Made:
        root, before = self._rooted(var)
        return _Made(root=root, steps=(*before, *steps), role=role, shape=tuple(map(int, shape)), **more)

    def _sides(self, eqn: Any) -> bool:
        """Whether the cotangent is the right operand; exactly one side may depend on it."""
        left, right = (self.flat.of_cotangent(v) for v in eqn.invars[:2])
        if left == right:
            raise _Stop("a product of two cotangents" if left else "a product without cotangents")
        return right

    def _dot(self, eqn: Any, summed: tuple[int, ...], views: Views, scale: float) -> _Core:
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
        return _Core(
            kind="dot",
            inputs=self._made(a[0], a[1], "inputs", a[2]),
            cotangents=self._made(d[0], d[1], "cotangents", d[2]),
            scale=scale,
            views=_tidy((*moves, *views)),
        )

    def _conv(self, eqn: Any, views: Views, scale: float) -> _Core:
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
        return _Core(
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

    def _index(self, eqn: Any, views: Views, scale: float) -> _Core:
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
        return _Core(
            kind="index",
            inputs=self._made(ids, (), "ids", (count,), size=int(shape[0]), clip=clip),
            cotangents=self._made(updates, (), "cotangents", (1, count, width)),
            scale=scale,
            views=_tidy((("reshape", tuple(map(int, shape))), *views)),
            geometry={"size": int(shape[0])},
        )

    def tie_sums(self, found: list[_Found]) -> None:
        """Tie sums of cotangents, such as biases, to the cotangents of the layer they belong to."""
        layers: dict[Any, list[_Made]] = {}
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

    def _tied(self, layers: dict[Any, list[_Made]], var: Any, scale: float, views: Views) -> _Core:
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
                return _Core(kind="dot", inputs=None, cotangents=made, scale=scale, views=())
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


def _is_zero(flat: _Flat, var: Any) -> bool:
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


def _pairable(cores: list[_Core]) -> bool:
    """Whether products of the rows' parts can be formed for every two terms of a leaf."""
    kinds = {core.kind for core in cores}
    if len(cores) < 2:
        return True
    if kinds <= {"index", "dot"} and "index" in kinds:
        index = next(core for core in cores if core.kind == "index")
        size, width = index.geometry["size"], index.cotangents.shape[2]
        return all(_is_table(core, size, width) for core in cores)
    if kinds == {"dot"}:
        first = cores[0]
        assert first.inputs is not None
        blocks = {
            (c.views, c.cotangents.shape[0], c.cotangents.shape[2], c.inputs and c.inputs.shape[2]) for c in cores
        }
        return len(blocks) == 1
    geometry = [(core.views, core.geometry, core.inputs and core.inputs.shape) for core in cores]
    return all(entry == geometry[0] for entry in geometry)


def _is_table(core: _Core, size: int, width: int) -> bool:
    """Whether a term's block is a table `(size, width)` or its transpose, as that of a tied embedding is."""
    if core.kind == "index":
        return core.views == () and core.cotangents.shape[2] == width and core.geometry["size"] == size
    assert core.inputs is not None
    if core.cotangents.shape[0] != 1:
        return False
    block = (core.inputs.shape[2], core.cotangents.shape[2])
    if block == (size, width) and not core.views:
        return True
    return block == (width, size) and core.views == (("reshape", (width, size)), ("transpose", (1, 0)))


def _choose(
    found: list[_Found], described: Sequence[tuple[str, tuple[int, ...], str]], n_outputs: int, layout: str
) -> list[bool]:
    """Which leaves are stored by their factors."""
    chosen = []
    for leaf, (_, shape, _) in zip(found, described, strict=True):
        products = bool(leaf.terms) and not leaf.pending
        numbers, size = sum(core.numbers(n_outputs) for core in leaf.terms), n_outputs * math.prod(shape)
        gain = CONV_GAIN if any(core.kind == "conv" for core in leaf.terms) else 1
        take = products and layout != "dense" and (layout == "factored" or SMALLEST <= size > gain * numbers)
        if products:
            leaf.why = f"{numbers:,} numbers against {size:,}" if layout != "dense" else "layout dense"
        chosen.append(take)
    stored = {core.cotangents.key for leaf, take in zip(found, chosen, strict=True) if take for core in leaf.terms}
    for n, leaf in enumerate(found):
        if leaf.pending and leaf.terms:
            chosen[n] = all(core.cotangents.key in stored for core in leaf.terms)
            leaf.why = "its layer's cotangents" if chosen[n] else "its layer is stored as rows"
    return chosen

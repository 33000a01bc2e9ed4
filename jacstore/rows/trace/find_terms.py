"""Find the products, look-ups or sums of cotangents that form the gradient of each parameter leaf.

A gradient is followed back through steps that only move or scale numbers. Sums of cotangents, such as the gradients of
biases, are tied to the cotangents of their layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jacstore.rows.trace.backward import Backward
from jacstore.rows.trace.candidates import MAX_MAP, Core, Made, added, pairable, stacked, tidy
from jacstore.rows.trace.gains import ConstantMaps
from jacstore.rows.trace.weight_maps import EntryByEntry, Inseparable, ProductBlock, Side, WeightMap
from jacstore.terms.kinds import Constant, Views

PRODUCTS = ("dot_general", "conv_general_dilated", "scatter-add", "scatter_add", "dynamic_update_slice")


@dataclass(kw_only=True)
class Found:
    """The cores of a leaf, or why there are none; a sum of cotangents is pending until its layer is known."""

    terms: list[Core] = field(default_factory=list)
    why: str = ""
    pending: list[tuple[Any, float, Views]] = field(default_factory=list)
    products: list[tuple[Any, Any, float]] = field(default_factory=list)


class _Stop(Exception):
    """A gradient cannot be followed further; the text says why."""


class _StopAtEntries(_Stop):
    """A weight is scaled entry by entry."""


@dataclass(frozen=True, kw_only=True)
class _Lookup:
    """A scatter into a table: along `axis` at `ids`, from the operand number `updates` of the equation.

    `windows` are axes of the updates and `places` the axes of the table that they fill.
    """

    axis: int
    ids: Any
    updates: int
    windows: tuple[int, ...]
    places: tuple[int, ...]
    clip: bool


@dataclass(kw_only=True)
class _Product:
    """An equation that forms a gradient; of a convolution `lead` are the keys of what is summed over on either side."""

    kind: str
    block: ProductBlock
    lead: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    ids: Made | None = None
    geometry: dict[str, Any] = field(default_factory=dict)

    def core(self, made: Callable[..., Made], scale: float, views: Views) -> Core:
        """The core of what is stored; `made(var, steps, role, shape)` makes an operand."""
        block, sizes = self.block, self.block.sizes
        operands: list[Made | None] = []
        for side, role, lead in zip((block.inputs, block.cotangents), ("inputs", "cotangents"), self.lead, strict=True):
            free = [key for key in block.free(side) if key not in lead]
            width = math.prod(sizes[key] for key in free)
            if self.kind == "conv":
                order = [*lead, *free]
                held = [sizes[key] for key in lead]
                shape = (*held, width) if role == "inputs" else (1, math.prod(held), width)
            else:
                order = [*block.groups, *block.summed, *free]
                shape = (*(math.prod(sizes[key] for key in part) for part in (block.groups, block.summed)), width)
            if side.var is None:
                operands.append(self.ids)
                continue
            side.transpose(order)
            operands.append(made(side.var, tuple(side.steps), role, shape))
        assert operands[1] is not None
        return Core(
            kind=self.kind,
            inputs=operands[0],
            cotangents=operands[1],
            scale=scale,
            views=tidy(views),
            geometry=self.geometry,
            slot=block.slot and block.slot[1:],
        )


class Finder:
    """Follow gradients back to the equations that form them.

    Attributes
    ----------
    read
        What stands in the terms as numbers, or decided them: values of variables that depend on parameters alone.
    """

    def __init__(self, flat: Backward, parameters: Sequence[Any]) -> None:
        self.flat, self._parameters = flat, parameters
        self.read: dict[Any, np.ndarray] = {}
        self._constants: dict[str, Constant] = {}
        self.layers = {root for eqn in flat.closed.jaxpr.eqns if (root := self._layer(eqn)) is not None}

    def _values(self, var: Any) -> np.ndarray:
        """The values of a variable that depends on parameters alone."""
        if var not in self.read:
            self.read[var] = self.flat.constants(var, self._parameters)
        return self.read[var]

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
            found.terms = self._cores(found.products)
            if found.terms and found.pending:
                raise _Stop("a product and a sum of cotangents")
            if not pairable(found.terms):
                raise _Stop("terms of unlike kinds")
            return found
        except _Stop as stop:
            return Found(why=str(stop))

    def _follow(self, var: Any, views: Any, scale: float, found: Found) -> None:
        """Add the cores of `scale * viewed(var)`."""
        flat = self.flat
        if isinstance(var, jex.Literal) or not flat.of_cotangent(var):
            if _is_zero(flat, var):
                return
            raise _Stop("a gradient that does not depend on the outputs")
        if _is_complex(var):
            raise _Stop("a complex product")
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
            found.products.append((eqn, views, scale))
            if name.startswith("scatter"):
                self._follow(operand, views, scale, found)
            elif name == "dynamic_update_slice" and not _is_zero(flat, operand):
                raise _Stop("a slice written over other numbers")
        elif (linear := self._map(eqn, var)) is not None:
            moving = next(v for v in eqn.invars if flat.of_cotangent(v))
            self._follow(moving, (("map", linear), *views), scale, found)
        elif name in ("while", "cond"):
            raise _Stop(f"inside {name}")
        else:
            found.pending.append((var, scale, views))

    def _cores(self, products: list[tuple[Any, Any, float]]) -> list[Core]:
        """The cores of a leaf; those of single layers of stacked weights become one core with a group for each."""
        if len(products) > 1 and all(any(kind == "map" for kind, _ in views) for _, views, _ in products):
            with suppress(_Stop):
                layers = stacked([self._product(*product, slots=True) for product in products])
                if layers:
                    return layers
        try:
            return [self._product(*product) for product in products]
        except _StopAtEntries:
            # A table's rows would have to be formed.
            if any(self._begun(eqn).kind == "index" for eqn, _, _ in products):
                raise
            # All of them up to their maps, so that they share their factors.
            return added([self._gained(*product) for product in products])

    def _gained(self, eqn: Any, views: Views, scale: float) -> Core:
        """The core of a product with all linear maps left behind it."""
        product = self._begun(eqn)
        maps = ConstantMaps(product.block.shape, self._constants, self._values)
        moves = product.block.views()
        try:
            steps = maps.follow(views)
        except Inseparable as error:
            raise _Stop(str(error)) from error
        core = product.core(self._made, scale, ())
        core.maps = tidy((("reshape", core.block_shape), *moves, *steps), first=1)
        core.constants = tuple(maps.constants)
        return core

    def _begun(self, eqn: Any) -> _Product:
        name = eqn.primitive.name
        begin = self._dot if name == "dot_general" else self._conv if name.startswith("conv") else self._index
        return begin(eqn)

    def _product(self, eqn: Any, views: Views, scale: float, slots: bool = False) -> Core:
        """The core of a product, with the linear maps behind it carried over to its operands."""
        product = self._begun(eqn)
        block = product.block
        block.keeps_slots = slots
        # After the last map, numbers are only moved, whatever the axes.
        count = max((n + 1 for n, (kind, _) in enumerate(views) if kind in ("map", "sum")), default=0)
        try:
            for kind, what in views[:count]:
                block.step(kind, what)
        except EntryByEntry as error:
            raise _StopAtEntries(str(error)) from error
        except Inseparable as error:
            raise _Stop(str(error)) from error
        return product.core(self._made, scale, (*block.views(), *views[count:]))

    def _map(self, eqn: Any, var: Any) -> WeightMap | None:
        """The linear step that produces `var`, if it can be carried over to a product."""
        flat, name, p = self.flat, eqn.primitive.name, eqn.params
        if name in ("slice", "rev"):
            return WeightMap(kind=name, params=p)
        if name == "split":
            return _one_of_split(eqn, eqn.outvars.index(var))
        if name == "pad" and _is_zero(flat, eqn.invars[1]):
            return WeightMap(kind="pad", params=p)
        if name == "broadcast_in_dim":
            return WeightMap(kind="broadcast", params=p)
        if name in ("mul", "div"):
            return self._scaling(eqn)
        if name == "dot_general":
            return self._matrix(eqn)
        if name == "scatter-add" and _is_zero(flat, eqn.invars[0]) and not self._of_data(eqn.invars[1]):
            found = self._lookup(eqn)
            ids, size = (found.ids, int(eqn.invars[0].aval.shape[found.axis]))
            lookups = [axis for axis in range(eqn.invars[2].aval.ndim) if axis not in found.windows]
            # A look-up that keeps its axis with length 1 has one axis more than the table.
            alike = eqn.invars[2].aval.ndim == eqn.invars[0].aval.ndim and lookups == [found.axis]
            if alike and math.prod(ids.aval.shape) == eqn.invars[2].aval.shape[found.axis]:
                params = {"axis": found.axis, "size": size, "clip": found.clip}
                return WeightMap(kind="scatter", params=params, needs=(ids,))
        return None

    def _of_data(self, var: Any) -> bool:
        return self.flat.of_cotangent(var) or self.flat.of_example(var)

    def _scaling(self, eqn: Any) -> WeightMap | None:
        """`mul` or `div` of a gradient by parameters that vary along some axes only."""
        left, right = eqn.invars
        if eqn.primitive.name == "mul" and self.flat.of_cotangent(right):
            left, right = right, left
        if not self.flat.of_cotangent(left) or self._of_data(right) or left.aval.shape != eqn.outvars[0].aval.shape:
            return None
        axes = list(range(right.aval.ndim))
        while not isinstance(right, jex.Literal) and (made := self.flat.producer.get(right)) is not None:
            name = made.primitive.name
            if name == "broadcast_in_dim":
                axes = [axes[dim] for dim in made.params["broadcast_dimensions"]]
            elif not _is_exact_cast(made):
                break
            right = made.invars[0]
        shape = right.aval.shape
        if isinstance(right, jex.Literal) or any(
            n not in (1, left.aval.shape[axis]) for n, axis in zip(shape, axes, strict=True)
        ):
            return None
        kept = [axis for n, axis in zip(shape, axes, strict=True) if n > 1]
        return WeightMap(kind="scale", params={"axes": kept, "divide": eqn.primitive.name == "div"}, needs=(right,))

    def _matrix(self, eqn: Any) -> WeightMap | None:
        """A product of a gradient with a matrix of parameters."""
        contract, batch = eqn.params["dimension_numbers"]
        sides = [self.flat.of_cotangent(var) for var in eqn.invars]
        if sides[0] == sides[1] or batch[0]:
            return None
        at = sides.index(True)
        matrix = eqn.invars[1 - at]
        if self._of_data(matrix) or isinstance(matrix, jex.Literal):
            return None
        free = [n for axis, n in enumerate(matrix.aval.shape) if axis not in contract[1 - at]]
        return WeightMap(
            kind="matmul",
            params={
                "axes": [int(axis) for axis in contract[at]],
                "others": [int(axis) for axis in contract[1 - at]],
                "sizes": free,
                "first": at == 1,
            },
            needs=(matrix,),
        )

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
            if made.primitive.name not in ("broadcast_in_dim", "reshape") and not _is_exact_cast(made):
                break
            scalar = made.invars[0]
        if _is_complex(scalar):
            return None
        if isinstance(scalar, jex.Literal):
            value = float(np.asarray(scalar.val)) if np.ndim(scalar.val) == 0 else math.nan
        elif math.prod(scalar.aval.shape) == 1:
            value = float(self._values(scalar).item())
        else:
            return None
        return (value, left) if math.isfinite(value) and value else None

    def _rooted(self, var: Any) -> tuple[Any, tuple[tuple[str, Any], ...]]:
        """The variable whose numbers `var` only moves, and the moves."""
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

    def _dot(self, eqn: Any) -> _Product:
        contract, batch = eqn.params["dimension_numbers"]
        right = self._sides(eqn)
        sizes: dict[int, int] = {}
        keys: list[list[int]] = []
        for side, var in enumerate(eqn.invars[:2]):
            shared = {axis: n for n, axis in enumerate((*batch[side], *contract[side]))}
            first = len(shared) + len(sizes) * side
            keys.append([shared.get(axis, first + axis) for axis in range(var.aval.ndim)])
            sizes.update(zip(keys[side], map(int, var.aval.shape), strict=True))
        free = [[key for key in side if key >= len(batch[0]) + len(contract[0])] for side in keys]
        left_side, right_side = (Side(var=var, keys=list(k)) for var, k in zip(eqn.invars, keys, strict=False))
        a, d = (left_side, right_side) if right else (right_side, left_side)
        axes = [*range(len(batch[0])), *free[0], *free[1]]
        return _Product(kind="dot", block=ProductBlock(a, d, axes, sizes))

    def _conv(self, eqn: Any) -> _Product:
        if not self._sides(eqn):
            raise _Stop("a convolution with the cotangent as image")
        p = eqn.params
        if p["feature_group_count"] != 1:
            raise _Stop("a convolution with feature groups in its gradient")
        lhs, rhs, out = (tuple(s) for s in p["dimension_numbers"])
        image, cotangent = eqn.invars[:2]
        spatial, groups = len(lhs) - 2, int(p["batch_group_count"])
        space = tuple(int(cotangent.aval.shape[axis]) for axis in rhs[2:])
        # Keys: entries of the window, then channel and width, then what is summed over.
        window, channel, width = tuple(range(spatial)), spatial, spatial + 1
        image_lead = range(spatial + 2, 2 * spatial + 3)
        cotangent_lead = range(2 * spatial + 3, 3 * spatial + 4)
        # In a filter's gradient channels stand at the batch axis, and the batch is what is summed over.
        image_axes = dict(zip((lhs[1], *lhs[2:], lhs[0]), (*image_lead, channel), strict=True))
        cotangent_axes = dict(zip((rhs[1], *rhs[2:], rhs[0]), (*cotangent_lead, width), strict=True))
        sizes = {key: int(image.aval.shape[axis]) for axis, key in image_axes.items()}
        sizes |= {key: int(cotangent.aval.shape[axis]) for axis, key in cotangent_axes.items()}
        sizes |= {key: int(eqn.outvars[0].aval.shape[axis]) for key, axis in zip(window, out[2:], strict=True)}
        axes = [0] * (spatial + 2)
        for key, axis in zip((*window, channel, width), (*out[2:], out[0], out[1]), strict=True):
            axes[axis] = key
        a = Side(var=image, keys=[image_axes[axis] for axis in range(spatial + 2)])
        d = Side(var=cotangent, keys=[cotangent_axes[axis] for axis in range(spatial + 2)])
        lead = (list(image_lead), list(cotangent_lead))
        if groups > 1:
            # Channels of the block are those of one group: no axis of the image, and none that can be mapped.
            inside, own = 3 * spatial + 4, 3 * spatial + 5
            axes = [{channel: inside, width: own}.get(key, key) for key in axes]
            sizes |= {inside: sizes[channel] // groups, own: sizes[width]}
        return _Product(
            kind="conv",
            block=ProductBlock(a, d, axes, sizes),
            lead=lead,
            geometry={
                "window": tuple(sizes[key] for key in window),
                "positions": space,
                "strides": tuple(map(int, p["rhs_dilation"])),
                "dilation": tuple(map(int, p["window_strides"])),
                "padding": tuple(int(low) for low, _ in p["padding"]),
                "spread": tuple(map(int, p["lhs_dilation"])),
                "groups": groups,
            },
        )

    def _index(self, eqn: Any) -> _Product:
        found = self._lookup(eqn)
        table, updates = eqn.invars[0], eqn.invars[found.updates]
        if self.flat.of_cotangent(found.ids) or not self.flat.of_cotangent(updates):
            raise _Stop("a scatter of something else than cotangents")
        if not self.flat.of_example(found.ids):
            raise _Stop("rows that no example chooses")
        shape = table.aval.shape
        # Keys: the axis that is looked up, axes of the look-ups, then those of the table.
        lookups = [axis for axis in range(updates.aval.ndim) if axis not in found.windows]
        keys = {axis: 1 + n for n, axis in enumerate(lookups)}
        keys |= {axis: 1 + len(lookups) + n for n, axis in enumerate(found.windows)}
        sizes = {key: int(updates.aval.shape[axis]) for axis, key in keys.items()} | {0: int(shape[found.axis])}
        windows = iter(
            keys[axis] for axis, place in zip(found.windows, found.places, strict=True) if place != found.axis
        )
        axes = [0 if axis == found.axis else next(windows) for axis in range(len(shape))]
        d = Side(var=updates, keys=[keys[axis] for axis in range(updates.aval.ndim)])
        ids = Side(var=None, keys=[keys[axis] for axis in lookups])
        count = math.prod(updates.aval.shape[axis] for axis in lookups)
        made = self._made(found.ids, (), "ids", (count,), size=int(shape[found.axis]), clip=found.clip)
        return _Product(
            kind="index", block=ProductBlock(ids, d, axes, sizes), ids=made, geometry={"size": int(shape[found.axis])}
        )

    def _lookup(self, eqn: Any) -> _Lookup:
        """How a scatter, or an update of a slice, writes to one axis of a table."""
        if eqn.primitive.name == "dynamic_update_slice":
            table, updates, *starts = eqn.invars
            shape, given = table.aval.shape, updates.aval.shape
            axes = [axis for axis in range(len(shape)) if given[axis] != shape[axis]]
            if len(axes) != 1 or given[axes[0]] != 1 or isinstance(starts[axes[0]], jex.Literal):
                raise _Stop("a slice at a place that the example chooses")
            every = tuple(range(len(shape)))
            return _Lookup(axis=axes[0], ids=starts[axes[0]], updates=1, windows=every, places=every, clip=True)
        table, ids, updates = eqn.invars
        numbers, mode = eqn.params["dimension_numbers"], str(eqn.params.get("mode")).upper()
        inserted, targets = tuple(numbers.inserted_window_dims), tuple(numbers.scatter_dims_to_operand_dims)
        windows, shape = tuple(numbers.update_window_dims), table.aval.shape
        places = tuple(axis for axis in range(len(shape)) if axis not in inserted)
        partial = [a for w, a in zip(windows, places, strict=False) if updates.aval.shape[w] != shape[a]]
        looked = sorted({*inserted, *partial})
        width_one = all(updates.aval.shape[w] == 1 for w, a in zip(windows, places, strict=False) if a in partial)
        if (
            getattr(numbers, "operand_batching_dims", ())
            or len(looked) != 1
            or looked[0] not in targets
            or not width_one
            or (len(targets) > 1 and "FILL" in mode)
        ):
            raise _Stop("a look-up that is not along one axis")
        # Along whole axes there is one place to start at.
        column = self._column(ids, targets.index(looked[0]))
        return _Lookup(axis=looked[0], ids=column, updates=2, windows=windows, places=places, clip="CLIP" in mode)

    def _column(self, ids: Any, number: int) -> Any:
        """The variable that is one column of indices `(..., columns)`."""
        if ids.aval.shape[-1] == 1:
            return ids
        made = self.flat.producer.get(ids)
        if made is None or made.primitive.name != "concatenate" or any(v.aval.shape[-1] != 1 for v in made.invars):
            raise _Stop("a look-up along several axes")
        return made.invars[number]

    def tie_sums(self, found: list[Found]) -> None:
        """Tie sums of cotangents, such as biases, to the cotangents of the layer they belong to."""
        layers: dict[Any, list[Made]] = {}
        for leaf in found:
            for core in leaf.terms:
                if isinstance(core.cotangents, Made) and core.cotangents.only_moved:
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
        if any(kind == "map" for kind, _ in views):
            raise _Stop("a linear map of a sum of cotangents")
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


def _one_of_split(eqn: Any, number: int) -> WeightMap:
    """The slice that one output of `split` is."""
    axis, sizes = eqn.params["axis"], eqn.params["sizes"]
    start, limit = [0] * eqn.invars[0].aval.ndim, list(eqn.invars[0].aval.shape)
    start[axis], limit[axis] = sum(sizes[:number]), sum(sizes[: number + 1])
    return WeightMap(kind="slice", params={"start_indices": start, "limit_indices": limit, "strides": None})


def _is_complex(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, np.complexfloating)


def _is_exact_cast(eqn: Any) -> bool:
    """Whether an equation only casts to a type that holds every value of the old type, so that it may be skipped."""
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if not jnp.issubdtype(after, np.floating):
        return False
    return before == np.bool_ or (jnp.issubdtype(before, np.floating) and jnp.promote_types(before, after) == after)


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

"""Carry linear maps between a weight and its product over to the operands of the product.

Where a network multiplies by a slice of a weight, by a permuted, scaled or centred one, or by `W + A @ B`, the row of
the weight is a linear map of the outer product `sum_t a_t ⊗ d_t`. A map that acts on axes of one side only is applied
to that side, `M (a ⊗ d) = (M a) ⊗ d`, which is exact and keeps the row in two factors. Axes of the product are followed
by name through every step; a map that joins both sides, such as a mask of single entries, has no such form.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from jacstore.terms.kinds import Views


class Inseparable(Exception):
    """A step acts on both sides of a product; the text says which."""


class EntryByEntry(Inseparable):
    """A weight is multiplied by an array that varies along axes that are not all of one side."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightMap:
    """A linear step of the program between a product and the gradient of a weight.

    Attributes
    ----------
    kind
        slice, pad, rev, scale, matmul, broadcast or scatter.
    params
        Parameters of the equation: bounds, paddings, axes.
    needs
        Variables that it multiplies or indexes by; they depend on parameters alone.
    """

    kind: str
    params: dict[str, Any]
    needs: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OperandMap:
    """A map of one operand: `apply(value, *values of needs)`; those of one `name` and the same needs are equal."""

    apply: Callable[..., Any] = field(compare=False)
    needs: tuple[Any, ...] = ()
    name: Any = field(default_factory=object)


@dataclass(kw_only=True)
class Side:
    """One operand on its way to its stored form: the variable, the steps applied to it, and its axes by key."""

    var: Any
    keys: list[int]
    steps: list[tuple[str, Any]] = field(default_factory=list)

    def transpose(self, keys: Sequence[int]) -> None:
        """Put the axes in the order of `keys`."""
        self.steps.append(("transpose", tuple(self.keys.index(key) for key in keys)))
        self.keys = list(keys)

    def apply(self, apply: Callable[..., Any], needs: tuple[Any, ...] = (), name: Any = None) -> None:
        """Add a map of the values; without a name it is equal to no other."""
        self.steps.append(("map", OperandMap(apply=apply, needs=needs, name=object() if name is None else name)))


class ArrayMaps:
    """Maps of operands that are arrays of JAX."""

    @staticmethod
    def repeated(value: Any, size: int, axis: int) -> Any:
        """An axis of length 1 made as long as `size`."""
        return jnp.repeat(value, size, axis)

    @staticmethod
    def scaled(value: Any, by: Any, order: Sequence[int], shape: Sequence[int], divide: bool) -> Any:
        """A value times numbers whose axes, put in `order`, make `shape`."""
        by = by.transpose(order).reshape(shape).astype(value.dtype)
        return value / by if divide else value * by

    @staticmethod
    def multiplied(value: Any, matrix: Any, places: Sequence[int], axes: Sequence[int], dropped: Sequence[int]) -> Any:
        """A value times a matrix: its axes `places` meet `axes` of the matrix without its axes `dropped`."""
        matrix = matrix.astype(value.dtype)
        return jnp.tensordot(value, matrix.squeeze(tuple(dropped)) if dropped else matrix, (places, axes))


class ProductBlock:
    """A product of two operands whose axes are followed through linear maps.

    Parameters
    ----------
    inputs, cotangents
        The two operands; a key that both have is a group if it is among `axes`, else it is summed over.
    axes
        Keys of the block's axes; None for an axis of length 1 that belongs to neither operand. A key that no operand
        has (an entry of a window, a row of a table) can be moved but not mapped.
    sizes
        Length of each axis by its key.

    Attributes
    ----------
    arrays
        How operands are mapped.
    """

    arrays: ClassVar[Any] = ArrayMaps

    def __init__(self, inputs: Side, cotangents: Side, axes: Sequence[int | None], sizes: dict[int, int]) -> None:
        self.inputs, self.cotangents = inputs, cotangents
        self.axes, self.sizes = list(axes), dict(sizes)
        self._fixed = sorted(key for key in self._named if not self._owners(key))
        self._fresh = itertools.count(1 + max(sizes, default=0))
        # Key, place and length of an axis at one place of which the whole block stands: a layer of stacked weights.
        self.slot: tuple[int, int, int] | None = None
        self.keeps_slots = False
        # New axes go to the side that was mapped last.
        self._last = inputs if inputs.var is not None else cotangents
        # Channels of a convolution in groups belong to neither side alone: another axis would mix the groups.
        named = self._named
        self._closed = inputs.var is not None and bool(named) and len(self._fixed) == len(named)

    # ------------------------------------------------------------------------------------------------- what it became

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(1 if key is None else self.sizes[key] for key in self.axes)

    @property
    def groups(self) -> list[int]:
        """Keys of axes that both operands keep."""
        return [key for key in self._named if self._owners(key) == [self.inputs, self.cotangents]]

    @property
    def summed(self) -> list[int]:
        """Keys of axes that are summed over: positions."""
        both = [key for key in self.inputs.keys if key in self.cotangents.keys]
        return sorted(key for key in both if key not in self._named)

    def free(self, side: Side) -> list[int]:
        """Keys of axes that only one operand has, those of the block first."""
        other = self.cotangents if side is self.inputs else self.inputs
        own = [key for key in side.keys if key not in other.keys]
        return [*(key for key in self._named if key in own), *(key for key in own if key not in self._named)]

    @property
    def _named(self) -> list[int]:
        return [key for key in self.axes if key is not None]

    def views(self) -> Views:
        """From `(groups, window or table, free of inputs, free of cotangents)` to the block's axes."""
        named = self._named
        order = [
            *([self.slot[0]] if self.slot else []),
            *self.groups,
            *self._fixed,
            *self.free(self.inputs),
            *self.free(self.cotangents),
        ]
        order = [key for key in order if key in named]
        # Shapes of JAX may hold NumPy's integers, which JSON cannot.
        moves: Views = (("reshape", tuple(int(self.sizes[key]) for key in order)),)
        moves += (("transpose", tuple(order.index(key) for key in named)),)
        return moves if len(named) == len(self.axes) else (*moves, ("reshape", tuple(map(int, self.shape))))

    def _owners(self, key: int) -> list[Side]:
        return [side for side in (self.inputs, self.cotangents) if key in side.keys]

    # ----------------------------------------------------------------------------------------------------------- steps

    def step(self, kind: str, what: Any) -> None:
        """Follow one step of the program.

        Raises
        ------
        Inseparable
            If it joins the two sides.
        """
        if kind == "transpose":
            self.axes = [self.axes[axis] for axis in what]
        elif kind == "reshape":
            self._reshape(what)
        elif kind == "sum":
            self._sum(what)
        else:
            getattr(self, f"_{what.kind}")(what)

    def _one_side(self, key: int) -> Side:
        owners = self._owners(key)
        if len(owners) != 1:
            raise Inseparable("a map of axes that both factors share" if owners else "a map of a window or a table")
        return owners[0]

    def _reshape(self, shape: Sequence[int]) -> None:
        axes: list[int | None] = []
        before, after = list(zip(self.axes, self.shape, strict=True)), list(shape)
        while before or after:
            taken, made = [before.pop(0)] if before else [], [after.pop(0)] if after else []
            while (have := math.prod(size for _, size in taken)) != (want := math.prod(made)):
                (taken.append(before.pop(0)) if have < want else made.append(after.pop(0)))
            axes += self._regrouped([key for key, size in taken if key is not None and size > 1], made)
        self.axes = axes

    def _regrouped(self, keys: list[int], sizes: list[int]) -> list[int | None]:
        """Axes `keys`, which stand side by side, as axes of other sizes."""
        long = [size for size in sizes if size > 1]
        if len(keys) == len(long) == 1:
            fresh = keys
        else:
            owners = self._owners(keys[0]) if keys else []
            if keys and (not owners or any(self._owners(key) != owners for key in keys)):
                raise Inseparable("a reshape across its factors")
            fresh = [next(self._fresh) for _ in long]
            self.sizes.update(zip(fresh, long, strict=True))
            for side in owners:
                rest = [key for key in side.keys if key not in keys]
                side.transpose([*rest, *keys])
                side.steps.append(("reshape", (*(self.sizes[key] for key in rest), *long)))
                side.keys = [*rest, *fresh]
        named = iter(fresh)
        return [next(named) if size > 1 else None for size in sizes]

    def _sum(self, axes: Sequence[int]) -> None:
        for axis in axes:
            key = self.axes[axis]
            if key is not None and len(self._owners(key)) < 2:
                side = self._one_side(key)
                place = side.keys.index(key)
                side.apply(lambda value, place=place: value.sum(place), name=("sum", place))
                side.keys.remove(key)
                self._last = side
        self.axes = [key for axis, key in enumerate(self.axes) if axis not in axes]

    def _along(
        self, axis: int, apply: Callable[..., Any], size: int, needs: tuple[Any, ...] = (), name: Any = None
    ) -> None:
        """Map one axis: `apply(value, place, *values)` gives that axis the length `size`."""
        key = self.axes[axis]
        if key is None:
            key = self._new_axis(axis)
        side = self._one_side(key)
        place = side.keys.index(key)
        side.apply(lambda value, *values: apply(value, place, *values), needs, name and (name, place))
        fresh = next(self._fresh)
        side.keys[place] = self.axes[axis] = fresh
        self.sizes[fresh] = size

    def _new_axis(self, axis: int) -> int:
        """Give an axis of length 1 a place on the side that was mapped last."""
        self._check_open()
        key = self.axes[axis] = next(self._fresh)
        self.sizes[key] = 1
        self._last.apply(lambda value: value[..., None], name="new axis")
        self._last.keys.append(key)
        return key

    def _check_open(self) -> None:
        if self._closed:
            raise Inseparable("a map of a convolution in groups")

    def _slice(self, what: WeightMap) -> None:
        start, limit, strides = (what.params[name] for name in ("start_indices", "limit_indices", "strides"))
        strides = strides or (1,) * len(start)
        for axis, (a, b, by, size) in enumerate(zip(start, limit, strides, self.shape, strict=True)):
            if (a, b, by) != (0, size, 1):
                self._along(
                    axis,
                    lambda v, at, a=a, b=b, by=by: lax.slice_in_dim(v, a, b, by, at),
                    len(range(a, b, by)),
                    name=("slice", a, b, by),
                )

    def _pad(self, what: WeightMap) -> None:
        for axis, (low, high, inner) in enumerate(what.params["padding_config"]):
            if self.keeps_slots and self.slot is None and self.axes[axis] is None and min(low, high) >= 0:
                key = self.axes[axis] = next(self._fresh)
                self.sizes[key] = 1 + int(low) + int(high)
                self.slot = (key, int(low), self.sizes[key])
            elif (low, high, inner) != (0, 0, 0):
                size = self.shape[axis]

                def pad(value: Any, at: int, width: tuple[int, int, int] = (low, high, inner)) -> Any:
                    widths = [width if n == at else (0, 0, 0) for n in range(value.ndim)]
                    return lax.pad(value, jnp.zeros((), value.dtype), widths)

                whole = size + low + high + max(0, size - 1) * inner
                self._along(axis, pad, whole, name=("pad", low, high, inner))

    def _rev(self, what: WeightMap) -> None:
        for axis in what.params["dimensions"]:
            if self.axes[axis] is not None:
                self._along(axis, lambda value, at: lax.rev(value, (at,)), self.shape[axis], name="rev")

    def _scale(self, what: WeightMap) -> None:
        """Multiply by an array that varies along `axes` only, all of one side."""
        axes = [axis for axis in what.params["axes"] if self.axes[axis] is not None]
        keys: list[int] = [key for axis in axes if (key := self.axes[axis]) is not None]
        try:
            sides = [self._one_side(key) for key in keys]
        except Inseparable as error:
            raise EntryByEntry(str(error)) from error
        if any(side is not sides[0] for side in sides):
            raise EntryByEntry("a weight scaled entry by entry")
        side = sides[0] if sides else self._last
        places, divide = [side.keys.index(key) for key in keys], what.params["divide"]

        sizes = [self.sizes[key] for key in keys]
        # The numbers have the scaled axes in the weight's order; the operand may have them in another.
        order = sorted(range(len(keys)), key=places.__getitem__)

        def scale(value: Any, by: Any) -> Any:
            shape = [size if place in places else 1 for place, size in enumerate(value.shape)]
            return self.arrays.scaled(value, by.reshape(sizes), order, shape, divide)

        side.apply(scale, what.needs, ("scale", *places, *sizes, divide))
        self._last = side

    def _matmul(self, what: WeightMap) -> None:
        """Multiply by a matrix of parameters, contracting axes of one side; its own axes come first or last."""
        axes, others, first = what.params["axes"], what.params["others"], what.params["first"]
        keys = [self.axes[axis] for axis in axes]
        sides = [self._one_side(key) for key in keys if key is not None]
        if any(side is not sides[0] for side in sides):
            raise Inseparable("a product that contracts both factors")
        self._check_open()
        side = sides[0] if sides else self._last
        # An axis of length 1 that is contracted is an axis of the matrix only.
        places = [side.keys.index(key) for key in keys if key is not None]
        sizes = what.params["sizes"]
        kept = [other for other, key in zip(others, keys, strict=True) if key is not None]
        dropped = tuple(other for other, key in zip(others, keys, strict=True) if key is None)

        renumbered = [other - sum(gone < other for gone in dropped) for other in kept]

        def multiply(value: Any, matrix: Any) -> Any:
            return self.arrays.multiplied(value, matrix, places, renumbered, dropped)

        side.apply(multiply, what.needs, ("matmul", *places, *renumbered, dropped))
        fresh = [next(self._fresh) for _ in sizes]
        self.sizes.update(zip(fresh, sizes, strict=True))
        side.keys = [*(key for place, key in enumerate(side.keys) if place not in places), *fresh]
        rest = [key for axis, key in enumerate(self.axes) if axis not in axes]
        self.axes = [*fresh, *rest] if first else [*rest, *fresh]
        self._last = side

    def _broadcast(self, what: WeightMap) -> None:
        """Repeat along new axes, on the side that was mapped last: `w - w.mean(0)`."""
        shape, dims = what.params["shape"], what.params["broadcast_dimensions"]
        given = {dim: (key, size) for dim, key, size in zip(dims, self.axes, self.shape, strict=True)}
        axes: list[int | None] = []
        for axis, size in enumerate(shape):
            key, had = given.get(axis, (None, 1))
            axes.append(key if had == size else None)
        self.axes = axes
        for axis, size in enumerate(shape):
            if self.axes[axis] is None and size > 1:
                self._along(
                    axis, lambda value, at, n=size: self.arrays.repeated(value, n, at), size, name=("repeat", size)
                )

    def _scatter(self, what: WeightMap) -> None:
        """Add entries along one axis to those of a longer or permuted one, at indices that no example changes."""
        size, clip = what.params["size"], what.params["clip"]

        def scatter(value: Any, at: int, ids: Any) -> Any:
            moved = jnp.moveaxis(value, at, 0)
            places = ids.reshape(-1)
            # `scatter` drops indices outside on both ends, whereas `at` would count negative ones from the end.
            places = jnp.clip(places, 0, size - 1) if clip else jnp.where(places < 0, size, places)
            placed = jnp.zeros((size, *moved.shape[1:]), value.dtype).at[places].add(moved, mode="drop")
            return jnp.moveaxis(placed, 0, at)

        self._along(what.params["axis"], scatter, size, what.needs)

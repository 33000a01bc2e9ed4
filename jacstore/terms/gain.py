"""A product behind a linear map that no example changes: weights that are masked, scaled or normalised entry by entry.

For `x @ (w * mask)` the row of `w` is `mask ∘ (xᵀ d)`. The factors x and d are stored for each example, the mask once.
With `L` the map and `B` the block, products with columns are those of the product with `Lᵀ` of the columns, and of the
transpose `L` of them, so that only kernels need the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar, Self

import numpy as np

from jacstore.terms.conv import Conv
from jacstore.terms.dot import Dot
from jacstore.terms.term import Constant, Factored, Operands, Shapes, Views, mapped

MOVES = ("reshape", "transpose")


@dataclass(frozen=True, kw_only=True)
class Gain(Factored):
    """`maps` of the block of a product.

    Attributes
    ----------
    product
        The product, without views.
    maps
        Steps of the map. The first reshapes the block to its shape, channels of cotangents last; `gain` multiplies by
        the constant of this number, whose axes are as long as those of the values or 1; `sum` adds along axes;
        `repeat` makes axes of length 1 as long as those of a shape.
    constants
        Arrays that no example changes.
    """

    kind: ClassVar[str] = "gain"
    formed: ClassVar[bool] = True
    in_verify: ClassVar[bool] = False
    product: Dot | Conv
    maps: Views
    constants: tuple[Constant, ...]

    @classmethod
    def behind(cls, product: Factored, maps: Views, constants: tuple[Constant, ...]) -> Self:
        """The map of a product without views of its own."""
        assert isinstance(product, Dot | Conv)
        return cls(product=product, maps=maps, constants=constants)

    @property
    def bare(self) -> Factored:
        return self.product

    @property
    def fixed(self) -> tuple[Constant, ...]:
        return self.constants

    @property
    def cotangents(self) -> str:
        return self.product.cotangents

    @property
    def scale(self) -> float:
        return self.product.scale

    @property
    def views(self) -> Views:
        return ()

    @property
    def source(self) -> str | None:
        return self.product.source

    def renamed(self, names: Mapping[str, str]) -> Self:
        return self.changed(product=self.product.renamed(names))

    def to_dict(self) -> dict[str, Any]:
        constants = [constant.to_dict() for constant in self.constants]
        return {"kind": self.kind, "product": self.product.to_dict(), "maps": self.maps, "constants": constants}

    def contradiction(self, shapes: Shapes) -> str | None:
        wrong = self.product.contradiction(shapes)
        if wrong is not None:
            return wrong
        try:
            block = math.prod(self.product.matrix_form(shapes)[0])
            fits = bool(self.maps) and self.maps[0][0] == "reshape" and math.prod(self.maps[0][1]) == block
            self._shapes()
        except (ValueError, IndexError):
            fits = False
        return None if fits else "have maps that fit its block and constants"

    def makes(self, size: int) -> bool:
        return math.prod(self._shapes()[-1]) == size

    def _shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the values after each step.

        Raises
        ------
        ValueError, IndexError
            If a step cannot follow the one before.
        """
        shapes = [self.maps[0][1]]
        for kind, numbers in self.maps[1:]:
            # Of one number seen as an array of this shape NumPy says what each step would make of it.
            seen = np.broadcast_to(np.float32(0), shapes[-1])
            if kind == "gain":
                constant = self.constants[numbers[0]].shape
                if len(constant) != seen.ndim or np.broadcast_shapes(constant, seen.shape) != seen.shape:
                    raise ValueError("a constant of another shape")
                shapes.append(shapes[-1])
            elif kind == "sum":
                if not all(axis < seen.ndim for axis in numbers):
                    raise IndexError("a sum along no axis")
                shapes.append(tuple(size for axis, size in enumerate(seen.shape) if axis not in numbers))
            elif kind == "repeat":
                shapes.append(np.broadcast_to(seen, numbers).shape)
            elif kind == "transpose":
                shapes.append(seen.transpose(numbers).shape)
            elif kind == "reshape" and math.prod(numbers) == math.prod(shapes[-1]):
                shapes.append(numbers)
            else:
                raise ValueError("an unknown step")
        return shapes

    def with_constants(self, change: Any) -> Self:
        return self.changed(constants=tuple(change(constant) for constant in self.constants))

    # ----------------------------------------------------------------------------------------------------------- rows

    def block(self, operands: Operands, xp: Any = np) -> Any:
        return mapped(self.product.block(operands, xp), self.maps, self.constants, lead=2, xp=xp)

    def for_slabs(self) -> Self:
        """Without the moves at the end, which do not change products of rows."""
        return self.changed(maps=self.maps[: len(self.maps) - len(self._end)])

    @property
    def _end(self) -> Views:
        """Moves behind the last step that changes numbers."""
        last = max((n for n, (kind, _) in enumerate(self.maps) if kind not in MOVES), default=0)
        return self.maps[last + 1 :]

    def of_patches(self) -> Factored:
        return self.for_slabs()

    def order(self) -> Any:
        places = self._channel_places()
        if not self.product.in_slabs or None in places:
            return None
        return self._end, places[-1], self._shapes()[len(places) - 1]

    def _channel_places(self) -> list[int | None]:
        """The axis of channels of cotangents after each step before the last moves; None where it is mixed."""
        place: int | None = len(self.maps[0][1]) - 1
        places, shapes = [place], self._shapes()
        steps = self.maps[1 : len(self.maps) - len(self._end)]
        for (kind, numbers), before, after in zip(steps, shapes, shapes[1:], strict=False):
            if place is not None and kind == "transpose":
                place = numbers.index(place)
            elif place is not None and kind == "sum":
                place = None if place in numbers else place - sum(axis < place for axis in numbers)
            elif place is not None and kind == "reshape":
                lead, width = math.prod(before[:place]), before[place]
                place = next(
                    (n for n, size in enumerate(after) if size == width and math.prod(after[:n]) == lead), None
                )
            elif place is not None and before[place] != after[place]:
                place = None
            places.append(place)
        return places

    def of_channels(self, first: int, last: int) -> Factored:
        maps, constants = list[tuple[str, tuple[int, ...]]](), list(self.constants)
        for (kind, numbers), place in zip(self.maps, self._channel_places(), strict=True):
            assert place is not None
            if kind == "gain" and (constant := self.constants[numbers[0]]).shape[place] > 1:
                at = (slice(None),) * place + (slice(first, last),)
                constants.append(constant.derived(itemgetter(at), f"{place}:{first}:{last}"))
                maps.append((kind, (len(constants) - 1,)))
            elif kind in ("reshape", "repeat"):
                maps.append((kind, (*numbers[:place], last - first, *numbers[place + 1 :])))
            else:
                maps.append((kind, numbers))
        return self.changed(maps=tuple(maps), constants=tuple(constants))

    # ---------------------------------------------------------------------------------------------- costs and memory

    def inside_flops(self, other: Factored, shapes: Shapes, elementwise: int) -> int | None:
        return 0

    def most_numbers(self, size: int) -> int:
        return max(size, *(math.prod(shape) for shape in self._shapes()))

    # ----------------------------------------------------------------------------------------- products with columns

    def matrix_form(self, shapes: Shapes) -> tuple[tuple[int, int, int], Views]:
        shape, moves = self.product.matrix_form(shapes)
        return shape, (*moves, *self.maps)

    # ------------------------------------------------------------------------------------------------------- rounding

    def magnitudes(self) -> Self:
        gains = self.with_constants(lambda constant: constant.derived(np.abs, "abs"))
        return gains.changed(product=self.product.magnitudes())

    def summed_size(self, norms: Mapping[str, float]) -> float:
        return self.product.summed_size(norms) * self._largest()

    def lost(self, operands: Operands, k: int, storage: str) -> float:
        return self.product.lost(operands, k, storage) * self._largest()

    def _largest(self) -> float:
        """A bound of the norm of the map."""
        bound, shapes = 1.0, self._shapes()
        for (kind, numbers), before, after in zip(self.maps[1:], shapes, shapes[1:], strict=False):
            if kind == "gain":
                bound *= float(np.abs(self.constants[numbers[0]].values()).max(initial=0))
            elif kind in ("sum", "repeat"):
                few, many = sorted((math.prod(before), math.prod(after)))
                bound *= math.sqrt(many / max(1, few))
        return bound

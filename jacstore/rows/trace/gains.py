"""Constant maps behind a product, where they cannot be carried over to its factors: masks and scales entry by entry."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jacstore.rows.trace.weight_maps import Inseparable, WeightMap
from jacstore.terms.kinds import Constant, Views


class ConstantMaps:
    """The steps of a map from a block to the gradient of a weight, and the constants that they multiply by.

    Parameters
    ----------
    shape
        Of what the steps begin with.
    known
        Constants by their content, named in the order in which they are found; new ones are added.
    value_of
        The values of a variable that depends on parameters alone.
    """

    def __init__(self, shape: Sequence[int], known: dict[str, Constant], value_of: Callable[[Any], np.ndarray]) -> None:
        self._shape, self._known, self._value_of = tuple(map(int, shape)), known, value_of
        self.constants: list[Constant] = []
        self._steps: list[tuple[str, tuple[int, ...]]] = []

    def follow(self, steps: Sequence[tuple[str, Any]]) -> Views:
        """All steps as those of a term.

        Raises
        ------
        Inseparable
            If one is neither a move, a sum, a repetition nor a product with a constant.
        """
        for kind, what in steps:
            if kind == "map":
                self._map(what)
            else:
                self._add(kind, tuple(map(int, what)))
        return tuple(self._steps)

    def _add(self, kind: str, numbers: tuple[int, ...]) -> None:
        self._steps.append((kind, numbers))
        if kind in ("reshape", "repeat"):
            self._shape = numbers
        elif kind == "transpose":
            self._shape = tuple(self._shape[axis] for axis in numbers)
        elif kind == "sum":
            self._shape = tuple(size for axis, size in enumerate(self._shape) if axis not in numbers)

    def _map(self, what: WeightMap) -> None:
        if what.kind == "scale":
            self._scale(what)
        elif what.kind == "broadcast":
            shape, dims = tuple(map(int, what.params["shape"])), what.params["broadcast_dimensions"]
            placed = dict(zip(dims, self._shape, strict=True))
            self._add("reshape", tuple(placed.get(axis, 1) for axis in range(len(shape))))
            self._add("repeat", shape)
        else:
            raise Inseparable("a map of a weight that is scaled entry by entry")

    def _scale(self, what: WeightMap) -> None:
        values = self._value_of(what.needs[0])
        values = values.astype(np.float64 if values.dtype == np.float64 else np.float32)
        with np.errstate(divide="ignore"):
            values = 1 / values if what.params["divide"] else values
        if not np.isfinite(values).all():
            raise Inseparable("a weight scaled by infinity")
        shape = [size if axis in what.params["axes"] else 1 for axis, size in enumerate(self._shape)]
        if math.prod(shape) != values.size:
            raise Inseparable("a weight scaled by an array of another shape")
        constant = Constant.of(f"gain{len(self._known)}", values.reshape(shape))
        # The same numbers in another shape are another constant.
        constant = self._known.setdefault(f"{constant.digest} {shape}", constant)
        if constant not in self.constants:
            self.constants.append(constant)
        self._add("gain", (self.constants.index(constant),))

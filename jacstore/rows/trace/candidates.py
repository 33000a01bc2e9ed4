"""Candidate terms: operands that a gradient could be stored by, their order of axes, and which terms pair up."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from jacstore.terms.kinds import KINDS, Constant, Factored, Gain, Views

# Index maps of cotangents larger than this are not compared; the leaf's bias is then stored as rows.
MAX_MAP = 20_000_000


@dataclass(frozen=True, kw_only=True)
class Made:
    """An operand: a variable of the program, and the steps that bring it into its stored form."""

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
        if math.prod(shape) > MAX_MAP or not self.only_moved:
            return self.steps
        found = moved(np.arange(math.prod(shape), dtype=np.int32).reshape(shape), self.steps)
        return hashlib.blake2b(found.tobytes(), digest_size=16).digest()

    @property
    def only_moved(self) -> bool:
        """Whether the numbers of the root are only moved, not changed."""
        return all(kind != "map" for kind, _ in self.steps)

    @property
    def needs(self) -> list[Any]:
        """The variables that it is formed from: its root, then those that its maps multiply by."""
        return [self.root, *(var for kind, step in self.steps if kind == "map" for var in step.needs)]

    def finish(self, values: Sequence[Any]) -> Any:
        """The operand from the values of what it `needs`."""
        value, more = values[0], iter(values[1:])
        for kind, step in self.steps:
            if kind == "map":
                value = step.apply(value, *(next(more) for _ in step.needs))
            else:
                value = moved(value, ((kind, step),))
        value = value.reshape(self.shape)
        if self.role != "ids":
            return value
        value = value.astype(jnp.int32)
        inside = (value >= 0) & (value < self.size)
        return jnp.clip(value, 0, self.size - 1) if self.clip else jnp.where(inside, value, -1)


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """Operands of one shape `(G, T, C)`, one after the other along the groups; None stands for zeros."""

    parts: tuple[Made | None, ...]

    @property
    def made(self) -> list[Made]:
        """The operands that are not zeros."""
        return [part for part in self.parts if part is not None]

    @property
    def root(self) -> Any:
        return self.made[0].root

    @property
    def role(self) -> str:
        return self.made[0].role

    @property
    def shape(self) -> tuple[int, ...]:
        groups, *rest = self.made[0].shape
        return (groups * len(self.parts), *rest)

    @property
    def key(self) -> Any:
        return ("stacked", *(part and part.key for part in self.parts))

    @property
    def only_moved(self) -> bool:
        return False

    @property
    def needs(self) -> list[Any]:
        return [var for part in self.made for var in part.needs]

    def finish(self, values: Sequence[Any]) -> Any:
        """The operand from the values of what it `needs`."""
        given = iter(values)
        found: list[Any] = [
            None if part is None else part.finish([next(given) for _ in part.needs]) for part in self.parts
        ]
        there = next(value for value in found if value is not None)
        return jnp.concatenate([jnp.zeros_like(there) if value is None else value for value in found])


def moved(value: Any, steps: Sequence[tuple[str, Any]]) -> Any:
    for kind, numbers in steps:
        value = value.reshape(numbers) if kind == "reshape" else value.transpose(numbers)
    return value


@dataclass(kw_only=True)
class Core:
    """A product, scatter or sum at which a gradient begins."""

    kind: str
    inputs: Made | Stacked | None
    cotangents: Made | Stacked
    scale: float
    views: Views
    geometry: dict[str, Any] = field(default_factory=dict)
    # Place and number of places along stacked weights, if the core is of one layer of them.
    slot: tuple[int, int] | None = None
    # A map behind the product, in place of views.
    maps: Views = ()
    constants: tuple[Constant, ...] = ()

    @property
    def smaller_by(self) -> int:
        """How much smaller than the rows its factors must be to be stored."""
        return KINDS[self.kind].smaller_by

    @property
    def from_factors(self) -> bool:
        """Whether rows are formed from its factors, if rows are stored."""
        return KINDS[self.kind].from_factors and not self.maps

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Of its block without views, channels of cotangents last."""
        groups, _, width = self.cotangents.shape
        channels = self.inputs.shape[-1] if self.inputs else 1
        if "window" not in self.geometry:
            return groups, channels, width
        return (*self.geometry["window"], channels // self.geometry["groups"], width)

    def numbers(self, n_outputs: int) -> int:
        return (math.prod(self.inputs.shape) if self.inputs else 0) + n_outputs * math.prod(self.cotangents.shape)

    def term(self, name_of: Callable[[Made | Stacked, bool], str], stored: bool) -> Factored:
        cotangents = name_of(self.cotangents, stored)
        inputs = None if self.inputs is None else name_of(self.inputs, stored)
        common = {"cotangents": cotangents, "scale": self.scale, "views": self.views}
        product = KINDS[self.kind].of(inputs, self.geometry, **common)
        return Gain.behind(product, self.maps, self.constants) if self.maps else product


def tidy(views: Views, first: int = 0) -> Views:
    """Remove moves that change nothing: a run of reshapes or transposes becomes one, and the identity none.

    The `first` ones are kept as they are.
    """
    moves: list[tuple[str, tuple[int, ...]]] = []
    for kind, moved in views[first:]:
        numbers = moved
        if kind not in ("reshape", "transpose"):
            moves.append((kind, numbers))
            continue
        if moves and moves[-1][0] == kind:
            before = moves.pop()[1]
            numbers = tuple(before[axis] for axis in numbers) if kind == "transpose" else numbers
        if kind == "reshape" or numbers != tuple(range(len(numbers))):
            moves.append((kind, numbers))
    # The last reshape only gives the leaf's shape, and rows are flat.
    while moves and moves[-1][0] == "reshape":
        moves.pop()
    return (*views[:first], *moves)


def stacked(cores: Sequence[Core]) -> list[Core] | None:
    """Cores of single layers of stacked weights as cores whose groups are the layers; None if they are unlike."""
    first = cores[0]
    for core in cores:
        same = core.kind == "dot" and core.inputs is not None and core.slot is not None and first.inputs is not None
        if not same or core.inputs is None or core.slot is None or first.slot is None or first.inputs is None:
            return None
        shapes = (core.inputs.shape, core.cotangents.shape, core.views, core.scale, core.slot[1])
        if shapes != (first.inputs.shape, first.cotangents.shape, first.views, first.scale, first.slot[1]):
            return None
    # A layer that is used twice begins another core.
    rounds: list[dict[int, Core]] = []
    for core in cores:
        assert core.slot is not None
        free = next((places for places in rounds if core.slot[0] not in places), None)
        if free is None:
            rounds.append(free := {})
        free[core.slot[0]] = core
    assert first.slot is not None
    found = []
    for places in rounds:
        inputs, cotangents = list[Made | None](), list[Made | None]()
        for n in range(first.slot[1]):
            core_there = places.get(n)
            a, d = (core_there.inputs, core_there.cotangents) if core_there else (None, None)
            inputs.append(a if isinstance(a, Made) else None)
            cotangents.append(d if isinstance(d, Made) else None)
        found.append(
            Core(
                kind="dot",
                inputs=Stacked(parts=tuple(inputs)),
                cotangents=Stacked(parts=tuple(cotangents)),
                scale=first.scale,
                views=first.views,
            )
        )
    return found


def added(cores: Sequence[Core]) -> list[Core]:
    """Cores with those that differ in their scale alone added up, such as the two halves of the gradient of `w * w`."""
    found: dict[Any, Core] = {}
    for core in cores:
        key = (core.inputs and core.inputs.key, core.cotangents.key, core.maps, core.constants)
        if key in found:
            found[key].scale += core.scale
        else:
            found[key] = core
    return list(found.values())


def pairable(cores: list[Core]) -> bool:
    """Whether products of the rows' parts can be formed for every two terms of a leaf."""
    kinds = {core.kind for core in cores}
    if len(cores) < 2 or any(core.maps for core in cores):
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


def _is_table(core: Core, size: int, width: int) -> bool:
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

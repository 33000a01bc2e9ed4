"""What every kind of term can do, and the operands that terms are made of.

A term is a leaf's part of every row, stored as the two factors of a product: what went into a layer, and the cotangents
that came back. All cotangents have one form `(n, K, G, T, D)`: examples, outputs, groups, positions, channels. A block
is `sum_t a_t ⊗ d_kt`; `views` turn it into the leaf. They move numbers and never change them, so that products of rows
are products of blocks.

A kind is one class in a file of its own: it inherits what holds for any product from `Factored` and says the rest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from jacstore.base.precision import LOST

Views = tuple[tuple[str, tuple[int, ...]], ...]
# Of operands by name: their values, or their shapes without the axes of examples and outputs.
Operands = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

# Names of the axes of an operand of each role.
AXES = {
    "ids": ("position",),
    "inputs": ("group", "position", "channel"),
    "cotangents": ("group", "position", "channel"),
}


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A stored factor: for each example an array of `shape`, with a leading K if it is a cotangent."""

    name: str
    role: str
    shape: tuple[int, ...]

    @property
    def per_output(self) -> bool:
        """Whether there is one for each output."""
        return self.role == "cotangents"

    @property
    def integers(self) -> bool:
        """Whether it holds indices, which are never rounded."""
        return self.role == "ids"

    @property
    def ranked(self) -> bool:
        """Whether it has as many axes as its role; images, among inputs, have those of their space."""
        return len(self.shape) == len(AXES[self.role]) or (self.role == "inputs" and len(self.shape) > 1)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes of `shape`."""
        if self.role == "inputs" and len(self.shape) != 3:
            return ("image", *(f"space{axis}" for axis in range(len(self.shape) - 2)), "channel")
        return AXES[self.role]

    def lead(self, n_outputs: int) -> tuple[int, ...]:
        """The axis of outputs, if it has one."""
        return (n_outputs,) if self.per_output else ()

    def numbers(self, n_outputs: int) -> int:
        """Numbers stored per example."""
        return math.prod(self.shape) * (n_outputs if self.per_output else 1)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"name": self.name, "role": self.role, "shape": list(self.shape)}


@dataclass(frozen=True, kw_only=True)
class Constant:
    """An array that no example changes, such as a mask; equal to others of the same content.

    `source` is the array, or gives it: a store reads it when it is first needed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str
    source: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, name: str, values: np.ndarray) -> Constant:
        """A constant with its digest."""
        return cls(
            name=name, shape=tuple(values.shape), dtype=str(values.dtype), digest=digest_of(values), source=values
        )

    def values(self) -> np.ndarray:
        """The array."""
        found: np.ndarray = self.source() if callable(self.source) else self.source
        return found

    def derived(self, change: Callable[[np.ndarray], np.ndarray], how: str) -> Constant:
        """A constant made from this one; `how` tells it from others made from it."""
        made = change(self.values())
        return replace(self, shape=made.shape, digest=f"{self.digest} {how}", source=made)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype, "digest": self.digest}


def digest_of(values: np.ndarray) -> str:
    """A hash of the numbers of an array."""
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Factored:
    """What the package asks of a kind of term; a class of its own answers where a plain product would not do.

    Attributes
    ----------
    kind
        Its name in JSON.
    cotangents, scale, views
        The operand of cotangents, a number that the rows are multiplied with, and how a block becomes the leaf.
    smaller_by
        How much smaller than its rows its factors must be to be stored.
    from_factors
        Whether rows that are stored as rows are formed from its factors on the device.
    sparse
        Whether most of its row is zero, so that rows are never formed for products.
    formed
        Whether products of rows need the rows.
    in_verify
        Whether `verify` multiplies by its factors; rows are formed otherwise.

    Methods that raise NotImplementedError have no answer for all kinds. A kind leaves out those that it is never asked
    for: products of pairs if it is `formed`, those of `verify` if it is not `in_verify`, tensors if PyTorch never
    makes it.
    """

    kind: ClassVar[str]
    smaller_by: ClassVar[int] = 1
    from_factors: ClassVar[bool] = False
    sparse: ClassVar[bool] = False
    formed: ClassVar[bool] = False
    in_verify: ClassVar[bool] = True

    if TYPE_CHECKING:
        # Fields of every kind, in the order in which each writes them to JSON.
        @property
        def cotangents(self) -> str: ...
        @property
        def scale(self) -> float: ...
        @property
        def views(self) -> Views: ...

    @property
    def bare(self) -> Factored:
        """The product of its factors, without maps behind it."""
        return self

    @property
    def fixed(self) -> tuple[Constant, ...]:
        """Arrays that no example changes."""
        return ()

    def with_constants(self, change: Callable[[Constant], Constant]) -> Self:
        """The same term with every constant changed."""
        return self

    @classmethod
    def of(cls, inputs: str | None, geometry: Mapping[str, Any], **common: Any) -> Self:
        """A term of named operands; `geometry` says what only this kind has, `common` what all have."""
        # The fields are those of the kind's dataclass, which this base does not know.
        return cls(inputs=inputs, **common, **geometry)  # type: ignore[call-arg]

    def changed(self, **changes: Any) -> Self:
        """The same term with other fields."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"kind": self.kind, **asdict(self)}

    # ------------------------------------------------------------------------------------------------------- operands

    @property
    def source(self) -> str | None:
        """The operand of what went into the layer, if it is not all ones."""
        raise NotImplementedError

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of what it is made of, cotangents last."""
        return (self.cotangents,) if self.source is None else (self.source, self.cotangents)

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The same term with its operands by other names."""
        raise NotImplementedError

    @property
    def geometry(self) -> tuple[Any, ...]:
        """What two terms must have in common to be parts of one leaf, beside the shapes of their operands."""
        return ()

    def contradiction(self, shapes: Shapes) -> str | None:
        """What its numbers must be and are not, beside operands of these shapes; None if all fit."""
        return None

    def makes(self, size: int) -> bool:
        """Whether its maps end in as many numbers as a leaf has."""
        return True

    # ----------------------------------------------------------------------------------------------------------- rows

    def block(self, operands: Operands, xp: Any = np) -> Any:
        """`sum_t a_t ⊗ d_kt` for each example and output, before scale and views."""
        raise NotImplementedError

    def rows(self, operands: Operands, size: int, xp: Any = np) -> Any:
        """Its part of rows `(n, K, size)`."""
        part = viewed(self.block(operands, xp), self.views)
        part = part.reshape(*part.shape[:2], size)
        return part if self.scale == 1 else part * part.dtype.type(self.scale)

    def rows_in_torch(self, operands: Operands, torch: Any) -> Any:
        """As `rows`, of tensors, in torch's order; all outputs are columns of one product per example."""
        raise NotImplementedError

    def for_slabs(self) -> Factored:
        """The term of the same numbers in any order."""
        return self.changed(views=())

    def of_patches(self) -> Factored:
        """As `for_slabs`, as a product with `patch_operands`."""
        return self.for_slabs()

    def order(self) -> Any:
        """Equal for terms whose numbers `for_slabs` stand in the same order; None if channels cannot be cut apart."""
        return self.views

    def of_channels(self, first: int, last: int) -> Factored:
        """The term `for_slabs` of some channels of its cotangents."""
        return self

    def input_columns(self, operands: Operands) -> int | None:
        """Columns of what its cotangents are multiplied with; None if rows can be cut into slabs by channels alone."""
        return None

    def some_inputs(self, operands: Operands, first: int, last: int) -> Any:
        """Columns `first` to `last` of what its cotangents are multiplied with, `(n, T, last - first)`."""
        raise NotImplementedError

    def patch_operands(self, operands: Operands) -> Operands:
        """What is worth cutting out of the inputs once, if rows are formed a few channels at a time."""
        return {}

    # ---------------------------------------------------------------------------------------------- products of pairs

    def n_groups(self, cotangents: Any) -> int:
        """Groups of channels that are not multiplied with each other."""
        return int(cotangents.shape[2])

    def inside(self, other: Self, left: Operands, right: Operands, group: int, xp: Any) -> Any:
        """Products `(T, S, n, m)` of what went into the layer with that of a like term; None where all are 1."""
        raise NotImplementedError

    def own_inside(self, other: Self, operands: Operands, group: int, xp: Any) -> Any:
        """Products `(n, T, S)` of what went into the layer, of each example with itself; None where all are 1."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------------------- costs and memory

    def inside_flops(self, other: Self, shapes: Shapes, elementwise: int) -> int | None:
        """Operations of `inside` for a pair of examples; None if positions are summed before.

        Adding or multiplying a number apart costs `elementwise` operations of a matrix product.
        """
        raise NotImplementedError

    def own_flops(self, shapes: Shapes) -> int:
        """Multiplications of products of an example with itself, one output."""
        t, width = shapes[self.cotangents][1:]
        channels = 0 if self.source is None else shapes[self.source][-1]
        return t * t * (channels + width)

    def most_numbers(self, size: int) -> int:
        """Numbers of a row on its way to a leaf of this size."""
        return size

    @property
    def in_slabs(self) -> bool:
        """Whether rows can be formed a few channels of cotangents at a time."""
        return not self.sparse

    @property
    def is_simple(self) -> bool:
        """Whether it is one product of inputs with cotangents in each position."""
        return False

    def pair_numbers(self, shapes: Shapes) -> int:
        """Numbers of products of what went into the layer, for a pair of examples."""
        return shapes[self.cotangents][1] ** 2

    def most_positions(self, shapes: Shapes) -> int:
        """The most positions, or pixels, that products run over; for patches what takes as much."""
        return shapes[self.cotangents][1]

    def patch_positions(self, shapes: Shapes) -> int:
        """Positions of `patch_operands`."""
        return 0

    # ----------------------------------------------------------------------------------------- products with columns

    def matrix_form(self, shapes: Shapes) -> tuple[tuple[int, int, int], Views]:
        """Its block as matrices `(G, C, D)`, and the moves that turn them into the leaf."""
        groups, _, width = shapes[self.cotangents]
        return (groups, 1 if self.source is None else shapes[self.source][-1], width), self.views

    def copies_inputs(self, groups: int) -> bool:
        """Whether its inputs are copied before they are multiplied."""
        return groups > 1

    def matrix_inputs(self, inputs: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
        """Inputs of some examples as `(G, n * T, C)`."""
        return inputs.swapaxes(0, 1).reshape(shape[0], -1, shape[1])

    def through(
        self, operands: Operands, at: slice, matrices: np.ndarray, shape: tuple[int, int, int], positions: int
    ) -> np.ndarray:
        """What goes into the layer times matrices `(G, C, D * m)`, `(n, G * T * D, m)`."""
        groups, _, width = shape
        held = np.matmul(self.matrix_inputs(operands[self.operands[0]][at], shape), matrices)
        held = held.reshape(groups, -1, positions, matrices.shape[-1]).swapaxes(0, 1)
        return held.reshape(len(held), groups * positions * width, -1)

    def add_weighted(
        self, operands: Operands, at: slice, weighted: np.ndarray, shape: tuple[int, int, int], total: np.ndarray
    ) -> None:
        """Add inputs times weighted cotangents `(n, G, T, D * m)` to `total` `(G, C, D * m)`."""
        n, groups, t, columns = weighted.shape
        weighted = weighted.swapaxes(0, 1).reshape(groups, n * t, columns)
        inputs = self.matrix_inputs(operands[self.operands[0]][at], shape)
        total += np.matmul(inputs.swapaxes(1, 2), weighted)

    # ------------------------------------------------------------------------------- for `verify`, on a way of its own

    def summed_row(self, operands: Operands, d: np.ndarray) -> np.ndarray:
        """`sum_n` of rows `(size,)` before the scale, from cotangents `(n, G, T, D)` summed over outputs."""
        raise NotImplementedError

    def met(self, operands: Operands, matrix: np.ndarray, d: np.ndarray) -> np.ndarray:
        """What went into the layer times a row `(size,)`: `(n, G, T, D)`, or what broadcasts to it."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------- rounding

    def magnitudes(self) -> Self:
        """The term of absolute values, if its operands are absolute values."""
        return self.changed(scale=abs(self.scale))

    def summed_size(self, norms: Mapping[str, float]) -> float:
        """A bound of the norm of what its rows are summed from, from the norms of its floating operands."""
        return abs(self.scale) * float(np.prod([norms[name] for name in self.operands if name in norms]))

    def lost(self, operands: Operands, k: int, storage: str) -> float:
        """Norm of what one row may have lost because its numbers are too small for the stored type."""
        d = operands[self.cotangents][0, k].astype(np.float64)
        others: list[Any] = [operands[name][0] for name in self.operands if name != self.cotangents]
        a = others[0].astype(np.float64) if others and others[0].dtype.kind == "f" else np.ones(1)
        lost = float(np.linalg.norm(a)) * math.sqrt(d.size) + float(np.linalg.norm(d)) * math.sqrt(a.size)
        return abs(self.scale) * lost * LOST[storage]


def viewed(block: Any, views: Views) -> Any:
    """A block `(n, K, ...)` reshaped and transposed, its first two axes apart."""
    for kind, numbers in views:
        if kind == "reshape":
            block = block.reshape(*block.shape[:2], *numbers)
        else:
            block = block.transpose(0, 1, *(axis + 2 for axis in numbers))
    return block


def mapped(values: Any, moves: Views, constants: Sequence[Constant], *, lead: int, trail: int = 0, xp: Any = np) -> Any:
    """Values after moves and maps of their axes, those of the first `lead` and the last `trail` axes apart."""
    for kind, numbers in moves:
        before, after = values.shape[:lead], values.shape[values.ndim - trail :]
        if kind == "reshape":
            values = values.reshape(*before, *numbers, *after)
        elif kind == "transpose":
            values = values.transpose(
                *range(lead), *(n + lead for n in numbers), *range(values.ndim - trail, values.ndim)
            )
        elif kind == "gain":
            values = values * _gain(constants[numbers[0]], trail, values.dtype, xp)
        elif kind == "sum":
            values = values.sum(tuple(axis + lead for axis in numbers))
        else:
            values = xp.broadcast_to(values, (*before, *numbers, *after))
    return values


def mapped_back(
    values: np.ndarray, moves: Views, constants: Sequence[Constant], shape: tuple[int, ...], *, trail: int = 0
) -> np.ndarray:
    """What the transpose of `mapped` makes of values of any shape: an array of `shape`."""
    shapes = [shape]
    for kind, numbers in moves:
        last = shapes[-1]
        if kind in ("reshape", "repeat"):
            shapes.append(numbers)
        elif kind == "transpose":
            shapes.append(tuple(last[axis] for axis in numbers))
        else:
            shapes.append(tuple(n for axis, n in enumerate(last) if kind != "sum" or axis not in numbers))
    after = values.shape[values.ndim - trail :]
    values = values.reshape(*shapes[-1], *after)
    for (kind, numbers), before in zip(reversed(moves), reversed(shapes[:-1]), strict=True):
        if kind == "reshape":
            values = values.reshape(*before, *after)
        elif kind == "transpose":
            values = values.transpose(*(int(n) for n in np.argsort(numbers)), *range(len(numbers), values.ndim))
        elif kind == "gain":
            values = values * _gain(constants[numbers[0]], trail, values.dtype, np)
        elif kind == "sum":
            kept = [1 if axis in numbers else size for axis, size in enumerate(before)]
            values = np.broadcast_to(values.reshape(*kept, *after), (*before, *after))
        else:
            repeated = tuple(axis for axis, size in enumerate(before) if size != numbers[axis])
            values = values.sum(repeated, keepdims=True)
    return values


def _gain(constant: Constant, trail: int, dtype: Any, xp: Any) -> Any:
    values = constant.values()
    return xp.asarray(values.reshape(*values.shape, *[1] * trail), dtype)


def positions_first(a: Any, b: Any, xp: Any) -> Any:
    """Products `(T, S, n, m)` of `(T, n, C)` with `(S, m, C)`."""
    if len(a) == len(b) == 1:
        return xp.matmul(a[0], b[0].T)[None, None]
    if xp is np:
        # One large product, whose numbers stand as (T, n, S, m): BLAS is slow at many small ones.
        (t, n, channels), (s, m, _) = a.shape, b.shape
        found = np.matmul(a.reshape(t * n, channels), b.reshape(s * m, channels).T)
        return found.reshape(t, n, s, m).transpose(0, 2, 1, 3)
    return xp.matmul(a[:, None], xp.swapaxes(b, -1, -2)[None])


def shapes_of(operands: Operands, names: Sequence[str], cotangents: str) -> dict[str, tuple[int, ...]]:
    """Shapes of operands without the axes of examples and outputs, from their values."""
    return {name: tuple(operands[name].shape[2 if name == cotangents else 1 :]) for name in names}

"""In: a parameter leaf. Out: the terms whose sum is its part of every row, and rows from what they store.

`Dense` is the row itself. `Dot`, `Conv` and `Index` keep the two factors of a product: what went into a layer, and the
cotangents that came back. All cotangents have one form `(n, K, G, T, D)`: examples, outputs, groups, positions,
channels. A block is `sum_t a_t ⊗ d_kt`; `views` turn it into the leaf. They move numbers and never change them, so
that products of rows are products of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np

from jacstore.base.schema import Signed

Views = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A stored factor: for each example an array of `shape`, with a leading K if it is a cotangent."""

    name: str
    role: str
    shape: tuple[int, ...]

    def numbers(self, n_outputs: int) -> int:
        """Numbers stored per example."""
        return math.prod(self.shape) * (n_outputs if self.role == "cotangents" else 1)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"name": self.name, "role": self.role, "shape": list(self.shape)}


@dataclass(frozen=True, kw_only=True)
class Dense:
    """The row itself: columns `start` to `start + size` of the array `rows` `(N, K, P_dense)`."""

    kind: ClassVar[str] = "dense"
    start: int
    size: int

    @property
    def operands(self) -> tuple[str, ...]:
        return ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A product of layer inputs `(n, G, T, C)` and cotangents; without inputs, the sum of cotangents over positions.

    Its block is `(n, K, G, C, D)`, C = 1 without inputs.
    """

    kind: ClassVar[str] = "dot"
    inputs: str | None
    cotangents: str
    scale: float
    views: Views

    @property
    def operands(self) -> tuple[str, ...]:
        return (self.cotangents,) if self.inputs is None else (self.inputs, self.cotangents)

    def block(self, operands: Mapping[str, Any], xp: Any = np) -> Any:
        d = operands[self.cotangents]
        if self.inputs is None:
            return d.sum(-2, keepdims=True)
        a = operands[self.inputs]
        return xp.matmul(xp.swapaxes(a, -1, -2)[:, None], d)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Conv:
    """A product of patches of images `(n, B, *space, C)` and cotangents at T = B * positions; patches are not stored.

    Entry w of the window meets position t at input `t * strides + w * dilation - padding` of the image, whose pixels
    stand `spread` apart. Its block is `(n, K, *window, C / groups, D)`.
    """

    kind: ClassVar[str] = "conv"
    inputs: str
    cotangents: str
    scale: float
    views: Views
    window: tuple[int, ...]
    positions: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[Signed, ...]
    spread: tuple[int, ...]
    groups: int

    @property
    def operands(self) -> tuple[str, ...]:
        return (self.inputs, self.cotangents)

    def padded(self, images: Any, xp: Any = np) -> Any:
        """Images `(n, B, *space, C)` with zeros around and between pixels, so that patches are plain slices."""
        for axis, (low, apart) in enumerate(zip(self.padding, self.spread, strict=True), start=2):
            if apart > 1:
                spaced = xp.stack([images, *[xp.zeros_like(images)] * (apart - 1)], axis + 1)
                shape = (*images.shape[:axis], images.shape[axis] * apart, *images.shape[axis + 1 :])
                last = (images.shape[axis] - 1) * apart + 1
                images = xp.take(spaced.reshape(shape), xp.arange(last), axis)
            if low < 0:
                images = images[(slice(None),) * axis + (slice(-low, None),)]
            needed = (self.positions[axis - 2] - 1) * self.strides[axis - 2] + 1
            needed += (self.window[axis - 2] - 1) * self.dilation[axis - 2]
            missing = needed - images.shape[axis] - max(low, 0)
            around = [(0, 0)] * images.ndim
            around[axis] = (max(low, 0), max(missing, 0))
            images = xp.pad(images, around)
            if missing < 0:
                images = images[(slice(None),) * axis + (slice(0, needed),)]
        return images

    def slices(self, entry: tuple[int, ...]) -> tuple[slice, ...]:
        """Where in a padded image the positions are that a window's entry meets."""
        return tuple(
            slice(w * d, w * d + (t - 1) * s + 1, s)
            for w, d, t, s in zip(entry, self.dilation, self.positions, self.strides, strict=True)
        )

    def patches(self, images: Any, xp: Any = np) -> Any:
        """Patches `(n, 1, T, window * C)` of images, for a convolution without groups."""
        padded = self.padded(images, xp)
        n, channels = len(images), images.shape[-1]
        count = images.shape[1] * math.prod(self.positions)
        cut = [padded[(slice(None), slice(None), *self.slices(entry))] for entry in np.ndindex(*self.window)]
        return xp.stack([patch.reshape(n, count, channels) for patch in cut], 2).reshape(n, 1, count, -1)

    def block(self, operands: Mapping[str, Any], xp: Any = np) -> Any:
        images, d = self.padded(operands[self.inputs], xp), operands[self.cotangents][:, :, 0]
        n, channels = len(images), images.shape[-1]
        k, t, width = d.shape[1:]
        grouped = d.reshape(n, k, t, self.groups, width // self.groups).swapaxes(2, 3)
        parts = []
        for entry in np.ndindex(*self.window):
            patch = images[(slice(None), slice(None), *self.slices(entry))]
            patch = patch.reshape(n, t, self.groups, channels // self.groups).transpose(0, 2, 3, 1)
            # (n, k, groups, channels / groups, width / groups)
            part = xp.matmul(patch[:, None], grouped)
            parts.append(part.swapaxes(2, 3).reshape(n, k, channels // self.groups, width))
        return xp.stack(parts, 2).reshape(n, k, *self.window, channels // self.groups, width)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Index:
    """Rows looked up in a table: `ids` `(n, T)`, -1 for none, and cotangents; its block is `(n, K, size, D)`."""

    kind: ClassVar[str] = "index"
    ids: str
    cotangents: str
    scale: float
    views: Views
    size: int

    @property
    def operands(self) -> tuple[str, ...]:
        return (self.ids, self.cotangents)

    def block(self, operands: Mapping[str, Any], xp: Any = np) -> Any:
        ids, d = operands[self.ids], operands[self.cotangents][:, :, 0]
        hot = (ids[:, :, None] == xp.arange(self.size)).astype(d.dtype)
        return xp.matmul(xp.swapaxes(hot, -1, -2)[:, None], d)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"kind": self.kind, **asdict(self)}


Term = Dense | Dot | Conv | Index
Factored = Dot | Conv | Index


def expand(terms: tuple[Term, ...], operands: Mapping[str, Any], size: int, xp: Any = np) -> Any:
    """A factored leaf's part of rows, `(n, K, size)`, from its operands `(n, ...)` and `(n, K, ...)`."""
    total = None
    for term in terms:
        assert not isinstance(term, Dense)
        part = viewed(term.block(operands, xp), term.views)
        part = part.reshape(*part.shape[:2], size)
        part = part if term.scale == 1 else part * part.dtype.type(term.scale)
        total = part if total is None else total + part
    return total


def renamed(term: Term, names: Mapping[str, str]) -> Term:
    """A term with its operands by other names."""
    if isinstance(term, Dense):
        return term
    cotangents = names[term.cotangents]
    if isinstance(term, Index):
        return replace(term, ids=names[term.ids], cotangents=cotangents)
    if isinstance(term, Conv):
        return replace(term, inputs=names[term.inputs], cotangents=cotangents)
    return replace(term, inputs=None if term.inputs is None else names[term.inputs], cotangents=cotangents)


def viewed(block: Any, views: Views) -> Any:
    """A block `(n, K, ...)` reshaped and transposed, its first two axes apart."""
    for kind, numbers in views:
        if kind == "reshape":
            block = block.reshape(*block.shape[:2], *numbers)
        else:
            block = block.transpose(0, 1, *(axis + 2 for axis in numbers))
    return block


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One selected parameter array: its place in the row is columns `offset` to `offset + size`."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    terms: tuple[Term, ...]
    why: str = ""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dense(self) -> Dense | None:
        """Its place among stored rows, if it is stored as rows."""
        return self.terms[0] if isinstance(self.terms[0], Dense) else None

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands it is made of."""
        return tuple(dict.fromkeys(name for term in self.terms for name in term.operands))

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "path": self.path,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "offset": self.offset,
            "terms": [term.to_dict() for term in self.terms],
            "why": self.why,
        }


def dense_leaves(described: list[tuple[str, tuple[int, ...], str]]) -> tuple[Leaf, ...]:
    """Leaves stored as rows, side by side in the order given: path, shape and dtype of each."""
    leaves, offset = [], 0
    for path, shape, dtype in described:
        size = math.prod(shape)
        term = Dense(start=offset, size=size)
        leaves.append(Leaf(path=path, shape=tuple(shape), dtype=dtype, offset=offset, terms=(term,)))
        offset += size
    return tuple(leaves)

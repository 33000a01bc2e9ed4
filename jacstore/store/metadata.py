"""Parse and check the root attributes of a store, or raise `DamagedDataError`.

A checksum guards attributes against accidents. The checks here also hold for made-up attributes: no name leads out of
the folder, no size exceeds its array, and every column has its place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jacstore.base.precision import ROUNDOFF
from jacstore.base.schema import Open
from jacstore.errors import DamagedDataError
from jacstore.storage.chunks import CODECS, ArrayLayout
from jacstore.store.unit_buffers import storage_dtype
from jacstore.terms.kinds import Conv, Dense, Leaf, Operand

DTYPES = ("float32", "bfloat16", "float16", "float64")
ROLES = {"ids": 1, "inputs": 3, "cotangents": 3}
# NumPy counts bytes in 63 bits.
LARGEST_ARRAY = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Numerics(Open):
    """The types, errors and device that decided the digits of a store or kernel."""

    lowest: str | None = None
    rounded_to: str | None = None
    expected_error: float | None = None
    worst_case: float | None = None
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class StoreChoices(Open):
    """The choices that were resolved when a store was created."""

    dtype: str
    codec: str
    unit_size: int
    arrays: tuple[ArrayLayout, ...]
    numerics: Numerics = Numerics()


@dataclass(frozen=True, kw_only=True)
class StoreAttributes(Open):
    """The attributes of a store."""

    N: int
    K: int
    P: int
    leaves: tuple[Leaf, ...]
    operands: tuple[Operand, ...]
    left_out: tuple[tuple[str, str], ...]
    fingerprint: dict[str, Any]
    resolved: StoreChoices
    versions: dict[str, str]
    sealed: bool = False


def check_store(found: StoreAttributes) -> None:
    """Refuse attributes that contradict themselves.

    Raises
    ------
    DamagedDataError
        Saying what does not agree.
    """
    resolved = found.resolved
    _need(min(found.N, found.K, found.P) >= 1, "N, K and P must be at least 1")
    _need(resolved.dtype in DTYPES, f"dtype {resolved.dtype!r} must be one of {', '.join(DTYPES)}")
    _need(resolved.codec in CODECS, f"codec {resolved.codec!r} must be one of {', '.join(CODECS)}")
    _need(1 <= resolved.unit_size <= found.N, f"unit_size {resolved.unit_size} must be from 1 to N")
    _check_numerics(resolved.numerics)
    _check_leaves(found)
    _check_operands(found.operands)
    expected = _expected_arrays(found)
    _need(
        [a.name for a in resolved.arrays] == list(dict.fromkeys(a.name for a in resolved.arrays))
        and {a.name for a in resolved.arrays} == set(expected),
        f"arrays must be {', '.join(sorted(expected))}",
    )
    for layout in resolved.arrays:
        _check_layout(layout, *expected[layout.name], resolved.unit_size)


def _check_numerics(numerics: Numerics) -> None:
    for dtype in (numerics.lowest, numerics.rounded_to):
        _need(dtype is None or dtype in ROUNDOFF, f"precision {dtype!r} must be one of {', '.join(ROUNDOFF)}")
    known = [error is not None for error in (numerics.expected_error, numerics.worst_case)]
    _need(known[0] == known[1], "errors must be expected and bounded, or unknown")


def _check_leaves(found: StoreAttributes) -> None:
    offset = start = 0
    shapes = {operand.name: operand.shape for operand in found.operands}
    names = set(shapes)
    for leaf in found.leaves:
        _need(leaf.offset == offset and bool(leaf.terms), f"leaf {leaf.path!r} must begin where the one before it ends")
        for term in leaf.terms:
            if isinstance(term, Dense):
                fits = len(leaf.terms) == 1 and (term.start, term.size) == (start, leaf.size)
                _need(fits, f"leaf {leaf.path!r} must have columns of its own among the rows")
                start += term.size
        _need(set(leaf.operands) <= names, f"the operands of leaf {leaf.path!r} must be described")
        for term in leaf.terms:
            if isinstance(term, Conv):
                _check_geometry(term, shapes, f"leaf {leaf.path!r}")
        offset += leaf.size
    _need(offset == found.P, f"leaves must have P = {found.P} columns")
    _need(len({leaf.path for leaf in found.leaves}) == len(found.leaves), "every leaf must have a path of its own")


def _check_geometry(term: Conv, shapes: Mapping[str, tuple[int, ...]], named: str) -> None:
    """Check that a convolution has numbers for every axis of the image, and fits the shapes of its operands."""
    images, cotangents = shapes[term.inputs], shapes[term.cotangents]
    along = (term.window, term.positions, term.strides, term.dilation, term.padding, term.spread)
    _need(all(len(numbers) == len(images) - 2 for numbers in along), f"{named} must have its geometry along every axis")
    positive = (*term.window, *term.positions, *term.strides, *term.dilation, *term.spread, term.groups)
    _need(min(positive) >= 1, f"{named} must have a geometry of positive numbers")
    fits = (
        len(cotangents) == 3
        and cotangents[:2] == (1, images[0] * math.prod(term.positions))
        and images[-1] % term.groups == cotangents[-1] % term.groups == 0
    )
    _need(fits, f"{named} must have the positions and channels of its operands")


def _check_operands(operands: Sequence[Operand]) -> None:
    for operand in operands:
        _need(re.fullmatch(r"\w[\w.-]*", operand.name) is not None, f"operand {operand.name!r} must be a plain name")
        _need(operand.role in ROLES, f"role {operand.role!r} of an operand must be one of {', '.join(ROLES)}")
        ranked = len(operand.shape) == ROLES[operand.role] or (operand.role == "inputs" and len(operand.shape) > 1)
        _need(ranked, f"operand {operand.name!r} must have as many axes as its role")
    _need(len({operand.name for operand in operands}) == len(operands), "every operand must have a name of its own")


def _expected_arrays(found: StoreAttributes) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Shape and allowed types of every array."""
    n, k = found.N, found.K
    stored = storage_dtype(found.resolved.dtype)
    columns = sum(leaf.size for leaf in found.leaves if leaf.dense)
    arrays: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "outputs": ((n, k), ("float32", "float64")),
        "norms": ((n, k, len(found.leaves)), ("float64",)),
    }
    if columns:
        arrays["rows"] = ((n, k, columns), (stored,))
    for operand in found.operands:
        lead = (k,) if operand.role == "cotangents" else ()
        dtype = "int32" if operand.role == "ids" else stored
        arrays[f"factors/{operand.name}"] = ((n, *lead, *operand.shape), (dtype,))
    return arrays


def _check_layout(layout: ArrayLayout, shape: tuple[int, ...], dtypes: tuple[str, ...], unit_size: int) -> None:
    name = layout.name
    _need(layout.shape == shape and min(shape) >= 1, f"array {name} must have the shape {shape}")
    _need(layout.dtype in dtypes, f"array {name} must be of type {dtypes[0]}")
    _need(math.prod(shape) * 8 <= LARGEST_ARRAY, f"array {name} must be small enough to be addressed")
    _need(layout.codec in CODECS, f"the codec of array {name} must be one of {', '.join(CODECS)}")
    _need(len(layout.dimensions) == len(shape), f"every axis of array {name} must have a name")
    fits = (
        layout.piece[:-1] == (unit_size, *shape[1:-1])
        and 1 <= layout.piece[-1] <= shape[-1]
        and layout.per_file[:-1] == (1,) * (len(shape) - 1)
        and 1 <= layout.per_file[-1] <= -(-shape[-1] // layout.piece[-1])
    )
    _need(fits, f"a piece of array {name} must hold the examples of a unit and some columns")


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise DamagedDataError(what)

"""Parse and check the root attributes of a store, or raise `DamagedDataError`.

A checksum guards attributes against accidents. The checks here also hold for made-up attributes: no name leads out of
the folder, no size exceeds its array, and every column has its place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from jacstore.base.limits import CODECS, DTYPES
from jacstore.base.precision import ROUNDOFF
from jacstore.base.schema import Open
from jacstore.errors import DamagedDataError
from jacstore.storage.chunks import ArrayLayout
from jacstore.store.unit_buffers import storage_dtype
from jacstore.terms.kinds import Constant, Leaf, Operand
from jacstore.terms.term import AXES

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
        rows = len(leaf.terms) - len(leaf.factored)
        if rows:
            dense = leaf.dense
            fits = dense is not None and len(leaf.terms) == 1 and (dense.start, dense.size) == (start, leaf.size)
            _need(fits, f"leaf {leaf.path!r} must have columns of its own among the rows")
            start += leaf.size
        _need(set(leaf.operands) <= names, f"the operands of leaf {leaf.path!r} must be described")
        for term in leaf.factored:
            wrong = term.contradiction(shapes)
            _need(wrong is None, f"leaf {leaf.path!r} must {wrong}")
            _need(term.makes(leaf.size), f"leaf {leaf.path!r} must have as many columns as its maps make")
        offset += leaf.size
    _need(offset == found.P, f"leaves must have P = {found.P} columns")
    constants = {constant for leaf in found.leaves for constant in leaf.constants}
    _check_constants(constants)
    _need(len({leaf.path for leaf in found.leaves}) == len(found.leaves), "every leaf must have a path of its own")


def _check_constants(constants: Collection[Constant]) -> None:
    _need(len({constant.name for constant in constants}) == len(constants), "every constant must have its own name")
    for constant in constants:
        named = f"constant {constant.name!r}"
        _need(re.fullmatch(r"\w[\w.-]*", constant.name) is not None, f"{named} must have a plain name")
        _need(constant.dtype in ("float32", "float64"), f"{named} must be of type float32 or float64")
        sizes = min(constant.shape, default=0) >= 1 and math.prod(constant.shape) * 8 <= LARGEST_ARRAY
        _need(sizes, f"{named} must be small enough to be addressed")


def _check_operands(operands: Sequence[Operand]) -> None:
    for operand in operands:
        _need(re.fullmatch(r"\w[\w.-]*", operand.name) is not None, f"operand {operand.name!r} must be a plain name")
        _need(operand.role in AXES, f"role {operand.role!r} of an operand must be one of {', '.join(AXES)}")
        _need(operand.ranked, f"operand {operand.name!r} must have as many axes as its role")
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
        dtype = "int32" if operand.integers else stored
        arrays[f"factors/{operand.name}"] = ((n, *operand.lead(k), *operand.shape), (dtype,))
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

"""The arrays of a store: their names below its root, and how operands are laid out in files."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jacstore.base.limits import LIMITS
from jacstore.storage.chunks import ArrayLayout
from jacstore.store.layout import PIECE_BYTES, StorePlan
from jacstore.store.unit_buffers import storage_dtype
from jacstore.terms.kinds import Operand


def operand_array(name: str) -> str:
    """The stored array of an operand."""
    return f"factors/{name}"


def operand_name(array: str) -> str:
    """The operand that a stored array holds."""
    return array.removeprefix("factors/")


def factor_bytes(operands: Sequence[Operand], n_outputs: int, dtype: str) -> int:
    """Bytes of factors that come with each example."""
    itemsize = np.dtype(storage_dtype(dtype)).itemsize
    return sum(o.numbers(n_outputs) * (4 if o.integers else itemsize) for o in operands)


def array_layouts(
    plan: StorePlan, n_leaves: int, operands: Sequence[Operand], dtype: str, outputs_dtype: str, codec: str
) -> list[ArrayLayout]:
    """All arrays whose values depend on the example: rows, factors, outputs, norms."""
    n, k, unit = plan.n_examples, plan.n_outputs, plan.unit_size
    rows = ArrayLayout(
        name="rows",
        shape=(n, k, plan.n_columns),
        piece=(unit, k, plan.piece_columns),
        per_file=(1, 1, plan.pieces_per_file),
        dtype=storage_dtype(dtype),
        codec=codec,
        dimensions=("example", "output", "parameter"),
    )
    outputs = ArrayLayout(
        name="outputs",
        shape=(n, k),
        piece=(unit, k),
        per_file=(1, 1),
        dtype=outputs_dtype,
        codec="none",
        dimensions=("example", "output"),
    )
    norms = ArrayLayout(
        name="norms",
        shape=(n, k, n_leaves),
        piece=(unit, k, n_leaves),
        per_file=(1, 1, 1),
        dtype="float64",
        codec="none",
        dimensions=("example", "output", "leaf"),
    )
    factors = [_operand_layout(operand, n, k, unit, dtype, codec) for operand in operands]
    return [*([rows] if plan.n_columns else []), *factors, outputs, norms]


def _operand_layout(operand: Operand, n: int, k: int, unit: int, dtype: str, codec: str) -> ArrayLayout:
    """The array of an operand, cut by unit and by channel."""
    lead = operand.lead(k)
    stored = "int32" if operand.integers else storage_dtype(dtype)
    *middle, columns = operand.shape
    column_bytes = unit * math.prod([*lead, *middle]) * np.dtype(stored).itemsize
    width = min(columns, max(1, PIECE_BYTES // column_bytes))
    width = -(-columns // -(-columns // width))
    per_file = min(-(-columns // width), max(1, LIMITS.file_bytes // (column_bytes * width)))
    # Readers such as xarray want one size for each name in a group.
    own = [*(["output"] if operand.per_output else []), *(f"{operand.name}_{axis}" for axis in operand.axes)]
    return ArrayLayout(
        name=operand_array(operand.name),
        shape=(n, *lead, *operand.shape),
        piece=(unit, *lead, *middle, width),
        per_file=(*[1] * (len(lead) + len(operand.shape)), per_file),
        dtype=stored,
        codec=codec,
        dimensions=("example", *own),
    )

"""What a caller gives for a unit: arrays of the right shape and kind, their norms, and what is not finite or lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jacstore.errors import InvalidRequestError
from jacstore.store.arrays import operand_array, operand_name
from jacstore.store.unit_buffers import UnitBlock, from_bfloat16
from jacstore.terms.kinds import Leaf, Operand, expand
from jacstore.terms.rounding import observed_rounding

# The effect of rounding is looked at in so many rows of an example.
ROUNDING_OUTPUTS = 4
LARGEST = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38, "float64": 1.79e308}


@dataclass(frozen=True, kw_only=True)
class UnitForm:
    """The form that the arrays of a unit have in one store, and what is derived from such arrays."""

    leaves: tuple[Leaf, ...]
    operands: tuple[Operand, ...]
    n_outputs: int
    dtype: str

    def checked(self, rows: Mapping[str, Any], count: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Rows of leaves `(n, K, size)` and operands, each of the right shape and kind."""
        if not isinstance(rows, Mapping):
            raise InvalidRequestError(
                f"rows of type {type(rows).__name__}; allowed is a mapping from leaves to arrays (rows=)"
            )
        unknown = sorted(set(rows) - {leaf.path for leaf in self.leaves})
        if unknown:
            raise InvalidRequestError(
                f"leaf {unknown[0]!r}: not a leaf of this store; leaves are {[f.path for f in self.leaves][:5]}"
            )
        k, arrays, factors = self.n_outputs, {}, {}
        described = {o.name: o for o in self.operands}
        for leaf in self.leaves:
            given = rows.get(leaf.path, None if leaf.dense else {})
            if leaf.dense:
                if given is None or isinstance(given, Mapping):
                    raise InvalidRequestError(f"leaf {leaf.path!r}: no rows given; it needs an array (n, K, *shape)")
                array = self._array(f"leaf {leaf.path!r}: rows", given, (count, k, *leaf.shape))
                arrays[leaf.path] = array.reshape(count, k, leaf.size)
                continue
            if not isinstance(given, Mapping):
                raise InvalidRequestError(
                    f"leaf {leaf.path!r} is stored by factors: give a mapping with {list(leaf.operands)}"
                )
            for name, values in given.items():
                if name not in leaf.operands:
                    raise InvalidRequestError(
                        f"leaf {leaf.path!r}: {name!r} is not one of its operands {list(leaf.operands)}"
                    )
                what = f"leaf {leaf.path!r}: operand {name!r}"
                operand = described[name]
                wanted = (count, *operand.lead(k), *operand.shape)
                factors[name] = self._array(what, values, wanted, integers=operand.integers)
        missing = [o.name for o in self.operands if o.name not in factors]
        if missing:
            raise InvalidRequestError(
                f"operand {missing[0]!r} is not given; every operand is needed, with one of its leaves"
            )
        return arrays, factors

    def _array(self, what: str, given: Any, wanted: tuple[int, ...], integers: bool = False) -> np.ndarray:
        if np.ma.isMaskedArray(given):
            raise InvalidRequestError(f"{what} is a masked array, whose mask would be lost; fill it")
        array = np.asarray(given)
        if array.shape != wanted:
            raise InvalidRequestError(f"{what} of shape {array.shape}, allowed is {wanted}")
        if integers:
            if array.dtype.kind not in "iu":
                raise InvalidRequestError(f"{what} of type {array.dtype}, allowed are integers")
            return array.astype(np.int32)
        bits = array.dtype == np.uint16
        if bits != (bits and self.dtype == "bfloat16") or not (array.dtype.kind in "fiub" or _is_bfloat16(array)):
            raise InvalidRequestError(f"{what} of type {array.dtype}, allowed are real numbers ({self.dtype})")
        if _is_bfloat16(array):
            array = array.view(np.uint16) if self.dtype == "bfloat16" else array.astype(np.float32)
        return array

    def norms(self, arrays: Mapping[str, np.ndarray], factors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Squared row norms `(n, K, L)` in float64, an example at a time to keep the copy small."""
        wide = {name: from_bfloat16(v) if v.dtype == np.uint16 else v for name, v in factors.items()}
        count = len(next(iter([*arrays.values(), *factors.values()])))
        norms = np.empty((count, self.n_outputs, len(self.leaves)))
        for n in range(count):
            one = {
                name: v[n : n + 1].astype(np.int32 if v.dtype.kind == "i" else np.float64) for name, v in wide.items()
            }
            for index, leaf in enumerate(self.leaves):
                if leaf.dense:
                    row = arrays[leaf.path][n]
                    row = from_bfloat16(row) if row.dtype == np.uint16 else row
                else:
                    row = expand(leaf.terms, one, leaf.size)[0]
                norms[n, :, index] = np.square(row, dtype=np.float64).sum(-1)
        return norms

    def nonfinite(self, blocks: Mapping[str, UnitBlock], norms: np.ndarray, proven: bool) -> list[int]:
        """Examples, counted from the first of the unit, with NaN or infinity in what will be stored."""
        # No entry is larger than the root of a norm; where that is well inside the stored type nothing can overflow.
        # A factor can, in a type as narrow as float16.
        proven = proven and not (self.operands and self.dtype == "float16")
        with np.errstate(over="ignore", invalid="ignore"):
            safe = np.sqrt(norms) < 0.99 * LARGEST[self.dtype]
        suspects = np.flatnonzero(~safe.all(axis=(1, 2))) if proven else np.arange(len(norms))
        bad = []
        for n in suspects:
            values = {name: block.example(int(n)) for name, block in blocks.items()}
            if not all(np.isfinite(v).all() for v in values.values()):
                bad.append(int(n))
            elif not np.isfinite(norms[n]).all():
                # Finite rows whose squares left float32: their norms are taken again in float64.
                wide = {
                    operand_name(name): v[None].astype(v.dtype if v.dtype.kind == "i" else np.float64)
                    for name, v in values.items()
                }
                for index, leaf in enumerate(self.leaves):
                    row = (
                        expand(leaf.terms, wide, leaf.size)[0]
                        if not leaf.dense
                        else (values["rows"][:, leaf.dense.start : leaf.dense.start + leaf.size])
                    )
                    norms[n, :, index] = np.square(row, dtype=np.float64).sum(-1)
        return bad

    def rounding(self, unit: int, blocks: Mapping[str, UnitBlock], norms: np.ndarray) -> dict[str, float] | None:
        """The effect of rounding on some rows of the first example; None if it cannot be seen there."""
        outputs = np.arange(0, self.n_outputs, -(-self.n_outputs // ROUNDING_OUTPUTS))
        operands, rows = {}, blocks["rows"].example(0)[outputs] if "rows" in blocks else None
        for operand in self.operands:
            values = blocks[operand_array(operand.name)].example(0)
            values = values[outputs] if operand.per_output else values
            operands[operand.name] = values[None] if operand.integers else values[None].astype(np.float64)
        return observed_rounding(self.leaves, rows, operands, norms[0, outputs].sum(-1), unit)


def _is_bfloat16(array: np.ndarray) -> bool:
    """Whether these are bfloat16 numbers of the package ml_dtypes, as JAX gives them."""
    return array.dtype.name == "bfloat16"


def shaped(given: np.ndarray, name: str, wanted: tuple[int, ...]) -> np.ndarray:
    """A real array of the wanted shape."""
    array = np.asarray(given)
    if array.shape != wanted or array.dtype.kind not in "fiub":
        raise InvalidRequestError(
            f"{name}: {array.dtype} of shape {array.shape}, allowed are real numbers of shape {wanted}"
        )
    return array.astype(np.float64) if name == "norms" else array

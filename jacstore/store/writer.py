"""Writes rows of examples, whoever computed them, a unit at a time, to disk or RAM, and marks what is durable.

Protocol of a unit: remove what a dead attempt left; write and flush its files; flush the folders; then one record with
the size and checksum of everything, put in place by rename. Only the record makes the unit exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jacstore.base import machine
from jacstore.base.budget import Budget
from jacstore.base.events import Listener, UnitDone, silent
from jacstore.base.limits import CODECS, DTYPES
from jacstore.base.machine import format_size
from jacstore.base.options import parse_count, parse_word
from jacstore.base.threads import all_done
from jacstore.errors import InvalidRequestError, NonFiniteError, RequestMismatchError
from jacstore.storage import zarr_group
from jacstore.storage.buckets import is_address, requests
from jacstore.storage.chunks import ArrayLayout, FileEncoder, FileRecord
from jacstore.storage.files import Files, Memory
from jacstore.storage.ledger import Lock, compare_requested, sweep
from jacstore.store.constants import GROUP, constant_layout, constants_of, keep_constants
from jacstore.store.layout import FILE_BYTES, PIECE_BYTES, StorePlan, plan_store
from jacstore.store.reader import JacobianStore, operand_array, operand_name
from jacstore.store.unit_buffers import UnitBlock, from_bfloat16, storage_dtype
from jacstore.terms.kinds import Constant, Leaf, Operand, dense_leaves, expand
from jacstore.terms.rounding import observed_rounding

ARRAYS = ("rows", "factors", "constants", "outputs", "norms")
# Where the effect of rounding is looked at: one example of so many units, and so many of its rows.
ROUNDING_UNITS, ROUNDING_OUTPUTS = 8, 4
LARGEST = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38, "float64": 1.79e308}


class StoreWriter:
    """Write rows computed anywhere into a store: `with StoreWriter(...) as writer: writer.write_unit(...)`.

    Opening it again with the same arguments continues; `missing` lists what is left.

    Parameters
    ----------
    path
        Folder of the store; None or "memory://" for RAM.
    leaves
        `(path, shape)` pairs or a mapping, in column order; or `jacstore.terms.Leaf` objects, whose terms may name
        factors.
    n_examples, n_outputs
        N and K.
    operands
        The factors that leaves name: `jacstore.terms.Operand` objects.
    dtype, codec, unit_size, memory
        As for `jacstore.build`. `codec` is none, lz4 or zstd.
    proposed_unit_size
        Of a new store, where `unit_size` is not given; one that another process began meanwhile keeps its own.
    requested
        Further facts that decide the rows; opening the store again with others is refused.
    numerics
        How the rows were computed, kept with the store: `lowest` is the lowest precision in it, for `jacstore.verify`.
    """

    def __init__(
        self,
        path: str | Path | None,
        leaves: Sequence[Any] | Mapping[str, tuple[int, ...]],
        n_examples: int,
        n_outputs: int,
        *,
        operands: Sequence[Operand] = (),
        dtype: str = "float32",
        codec: str = "none",
        unit_size: int | None = None,
        proposed_unit_size: int | None = None,
        memory: int | str | None = None,
        outputs_dtype: str = "float64",
        requested: Mapping[str, Any] | None = None,
        numerics: Mapping[str, Any] | None = None,
        left_out: Sequence[tuple[str, str]] = (),
        part: tuple[int, int] = (1, 1),
        allow_nonfinite: bool = False,
        overwrite: bool = False,
        listener: Listener = silent,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stop, self._entered = stop, False
        self._requests_before = requests()
        self.leaves, self.operands = _as_leaves(leaves), tuple(operands)
        unknown = {name for leaf in self.leaves for name in leaf.operands} - {o.name for o in self.operands}
        if unknown:
            raise InvalidRequestError(f"leaves name the operand {min(unknown)!r}, which operands= does not describe")
        budget = machine.default_memory(memory)
        dtype, codec = parse_word(dtype, DTYPES, "--dtype"), parse_word(codec, CODECS, "--codec")
        n_parameters = sum(leaf.size for leaf in self.leaves)
        if not (_counts(n_examples) and _counts(n_outputs) and n_parameters):
            raise InvalidRequestError(
                f"{n_examples} examples x {n_outputs} outputs x {n_parameters} parameters; allowed are integers of at "
                "least 1 (n_examples=, n_outputs=, leaves=)"
            )
        unit_size = parse_count(unit_size, "--unit-size")
        self.where = "memory://" if path is None else str(path)
        self.files = zarr_group.place(path, budget)
        self.dtype, self.listener, self.allow_nonfinite = dtype, listener, allow_nonfinite
        wanted = request_of(self.leaves, n_examples, n_outputs, dtype, requested or {})
        with zarr_group.creating(self.files, self.where, ARRAYS, overwrite, listener):
            if self.files.size(zarr_group.ROOT) is None:
                plan = plan_store(
                    n_examples=n_examples,
                    n_outputs=n_outputs,
                    n_columns=sum(leaf.size for leaf in self.leaves if leaf.dense),
                    factor_bytes=factor_bytes(self.operands, n_outputs, dtype),
                    factor_files=len(self.operands),
                    itemsize=np.dtype(storage_dtype(dtype)).itemsize,
                    memory=budget,
                    unit_size=unit_size or proposed_unit_size,
                )
                refuse_small_disk(self.where, plan)
                if isinstance(self.files, Memory):
                    # Beside it stand two units on their way and the copies of the files of one. Whoever holds more,
                    # such as a device pass, lowers the limit.
                    self.files.limit = max(0, Budget(budget).beside(unit_buffers=3 * plan.unit_bytes))
                self._create(plan, codec, outputs_dtype, wanted, left_out, numerics or {})
            self.store = JacobianStore(self.files, self.where)
            require_same(self.store, wanted, self.leaves, unit_size)
            keep_constants(self.files, self.where, self.store.leaves, self.leaves)
        self.units = _units_of_part(self.store.n_units, part)
        self._lock: Lock | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._done = set(self.store.ledger.done("unit"))
        # A store too large to stay in the page cache until it is read is not worth copying there.
        self._cached = 2 * self.store.bytes_decoded <= machine.available_memory()

    def __enter__(self) -> StoreWriter:
        if self.files.address is not None and self.units:
            self._lock = Lock(self.files, self.units.start, self.units.stop - 1, self.listener, self._stop)
            self._lock.__enter__()
        try:
            self._done = set(self.store.ledger.done("unit"))
            sweep(self.files, ["unit"], self.units)
            self._recheck()
            self.reused = len(self.units) - len(self.missing)
        except BaseException:
            # `with` does not call __exit__ if __enter__ raises.
            self.__exit__(None, None, None)
            raise
        self._entered = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._entered = False
        if self._pool is not None:
            self._pool.shutdown()
        if self._lock is not None:
            self._lock.__exit__(*exception)

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Example ranges of this part's units that are not finished, in order."""
        return [self.store.unit_range(unit) for unit in self.units if unit not in self._done]

    @property
    def requests(self) -> dict[str, int]:
        """Requests to buckets that this process has made since this writer began, by kind."""
        return dict(requests() - self._requests_before)

    @property
    def bytes_expected(self) -> int:
        """Bytes of this part's missing units with norms and outputs, before compression, padding included."""
        each = sum(
            layout.piece_bytes * math.prod(-(-n // m) for n, m in zip(layout.shape[1:], layout.piece[1:], strict=True))
            for layout in self.store.layouts.values()
        )
        return each * len(self.missing)

    def _recheck(self) -> None:
        """Make units unfinished again whose files are gone or torn, or which a reader or `verify` found damaged."""
        suspects = set(self.store.ledger.done("suspect"))
        for unit in sorted(self._done.intersection(self.units)):
            bad = self.store.must_recompute(unit) if unit in suspects else not self.store.sizes_match(unit)
            if bad:
                self.store.ledger.forget("unit", unit)
                self._done.discard(unit)
        for unit in suspects.intersection(self.units):
            self.store.ledger.forget("suspect", unit)

    def write_unit(
        self,
        start: int,
        rows: Mapping[str, Any],
        *,
        outputs: np.ndarray | None = None,
        norms: np.ndarray | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Store one unit and mark it as finished.

        Parameters
        ----------
        start
            First example of the unit; see `missing`.
        rows
            For each leaf stored as rows an array `(n, K, *shape)`, n examples; bfloat16 may come as uint16. For a
            factored leaf a mapping from operand names to arrays `(n, ...)`, cotangents `(n, K, ...)`; an operand that
            several leaves share is given with one of them.
        outputs
            `(n, K)`; NaN if not given.
        norms
            Squared row norms `(n, K, L)` before rounding; computed from `rows` in float64 if not given.
        facts
            Further entries of the unit's record.

        Raises
        ------
        InvalidRequestError
            If the unit is not one of this writer's or is finished already, or an array has the wrong shape.
        NonFiniteError
            If a row holds NaN or infinity, naming the examples.
        """
        unit = self._unit_to_write(start)
        count = self.store.unit_range(unit)[1] - start
        arrays, factors = self._check_arrays(rows, count)
        if norms is None:
            norms, proven = self._norms(arrays, factors), True
        else:
            norms, proven = _shaped(norms, "norms", (count, self.store.n_outputs, len(self.leaves))), False
            if norms.min(initial=0) < 0:
                raise InvalidRequestError(f"norms: {norms.min():.3g}; they are squares, at least 0 (norms=)")
        if outputs is None:
            outputs = np.full((count, self.store.n_outputs), np.nan)
        else:
            outputs = _shaped(outputs, "outputs", (count, self.store.n_outputs))
        blocks = self.new_blocks()
        for leaf in self.leaves:
            if leaf.dense:
                blocks["rows"].put((slice(0, count),), arrays[leaf.path], leaf.dense.start)
        for name, values in factors.items():
            blocks[operand_array(name)].put((slice(0, count),), values)
        self.write_blocks(start, blocks, outputs=outputs, norms=norms, facts=facts or {}, proven=proven)

    def new_blocks(self) -> dict[str, UnitBlock]:
        """Memory for one unit of every array whose values depend on the example, to be filled and written."""
        layouts = self.store.layouts
        blocks = {"rows": UnitBlock(layouts["rows"], self.dtype)} if "rows" in layouts else {}
        for operand in self.operands:
            dtype = "int32" if operand.integers else self.dtype
            blocks[operand_array(operand.name)] = UnitBlock(layouts[operand_array(operand.name)], dtype)
        return blocks

    def write_blocks(
        self,
        start: int,
        blocks: Mapping[str, UnitBlock],
        *,
        outputs: np.ndarray,
        norms: np.ndarray,
        facts: Mapping[str, Any],
        proven: bool,
    ) -> None:
        """As `write_unit`, from filled blocks; `proven` where a finite norm was summed over these very rows."""
        store, unit = self.store, self._unit_to_write(start)
        count = store.unit_range(unit)[1] - start
        nonfinite = self._nonfinite(start, blocks, norms, proven)
        for block in blocks.values():
            block.clear(count)
        small = {"outputs": outputs, "norms": norms}
        # Computed while the files wait for the disk.
        rounding = self._workers().submit(self._rounding, unit, blocks, norms)
        files = self._write_files(unit, blocks, small)
        self.files.sync_folders(files)
        size = sum(record.size for record in files.values())
        store.ledger.record(
            "unit",
            unit,
            {
                "start": start,
                "stop": start + count,
                "bytes": size,
                "zero_rows": int(np.sum(norms.sum(-1) == 0)),
                "zero_leaves": [n for n, leaf in enumerate(self.leaves) if leaf.size and not norms[..., n].any()],
                "nonfinite_examples": nonfinite,
                **rounding.result(),
                "files": {name: record.to_list() for name, record in files.items()},
                **facts,
            },
        )
        self._done.add(unit)
        self.listener(UnitDone(unit=unit, examples=count, bytes_stored=size))

    def _rounding(self, unit: int, blocks: Mapping[str, UnitBlock], norms: np.ndarray) -> dict[str, Any]:
        """The effect of rounding on the rows of the first example, in a few units."""
        if unit % -(-self.store.n_units // ROUNDING_UNITS):
            return {}
        outputs = np.arange(0, self.store.n_outputs, -(-self.store.n_outputs // ROUNDING_OUTPUTS))
        operands, rows = {}, blocks["rows"].example(0)[outputs] if "rows" in blocks else None
        for operand in self.operands:
            values = blocks[operand_array(operand.name)].example(0)
            values = values[outputs] if operand.per_output else values
            operands[operand.name] = values[None] if operand.integers else values[None].astype(np.float64)
        seen = observed_rounding(self.leaves, rows, operands, norms[0, outputs].sum(-1), unit)
        return {} if seen is None else {"rounding": seen}

    def _unit_to_write(self, start: int) -> int:
        """The unit that begins at an example, if it is this writer's to write."""
        if not self._entered:
            raise InvalidRequestError("units are written under a lock: use `with StoreWriter(...) as writer`")
        unit, rest = divmod(start, self.store.unit_size)
        if rest or unit not in self.units:
            raise InvalidRequestError(
                f"start {start}: no unit of this writer begins there; `missing` lists those to write"
            )
        if unit in self._done:
            raise InvalidRequestError(
                f"examples {start} to {self.store.unit_range(unit)[1] - 1} are stored already; `missing` lists the rest"
            )
        return unit

    def _check_arrays(self, rows: Mapping[str, Any], count: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
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
        k, arrays, factors = self.store.n_outputs, {}, {}
        described = {o.name: o for o in self.operands}
        for leaf in self.leaves:
            given = rows.get(leaf.path, None if leaf.dense else {})
            if leaf.dense:
                if given is None or isinstance(given, Mapping):
                    raise InvalidRequestError(f"leaf {leaf.path!r}: no rows given; it needs an array (n, K, *shape)")
                array = self._checked(f"leaf {leaf.path!r}: rows", given, (count, k, *leaf.shape))
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
                factors[name] = self._checked(what, values, wanted, integers=operand.integers)
        missing = [o.name for o in self.operands if o.name not in factors]
        if missing:
            raise InvalidRequestError(
                f"operand {missing[0]!r} is not given; every operand is needed, with one of its leaves"
            )
        return arrays, factors

    def _checked(self, what: str, given: Any, wanted: tuple[int, ...], integers: bool = False) -> np.ndarray:
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

    def _norms(self, arrays: Mapping[str, np.ndarray], factors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Squared row norms `(n, K, L)` in float64, an example at a time to keep the copy small."""
        wide = {name: from_bfloat16(v) if v.dtype == np.uint16 else v for name, v in factors.items()}
        count = len(next(iter([*arrays.values(), *factors.values()])))
        norms = np.empty((count, self.store.n_outputs, len(self.leaves)))
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

    def _nonfinite(self, start: int, blocks: Mapping[str, UnitBlock], norms: np.ndarray, proven: bool) -> list[int]:
        """Examples with NaN or infinity in what will be stored."""
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
                bad.append(int(start + n))
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
        if bad and not self.allow_nonfinite:
            shown = ", ".join(map(str, bad[:10])) + (" and others" if len(bad) > 10 else "")
            raise NonFiniteError(
                f"rows of example(s) {shown} hold NaN or infinity as {self.dtype}; mend or leave out those inputs, "
                "choose a wider --dtype (dtype=), or store them with --allow-nonfinite (allow_nonfinite=True)"
            )
        return bad

    def _workers(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.files.at_once, "jacstore-write")
        return self._pool

    def _write_files(
        self, unit: int, blocks: Mapping[str, UnitBlock], small: Mapping[str, np.ndarray]
    ) -> dict[str, FileRecord]:
        """Encode and write all files of a unit, several at a time: flushing waits for the disk, encoding for a core."""
        layouts = self.store.layouts
        files: dict[tuple[str, int], Iterator[np.ndarray | None]] = {
            (name, file): block.pieces(file)
            for name, block in blocks.items()
            for file in range(layouts[name].files_along(-1))
        }
        for name, values in small.items():
            files[name, 0] = iter([_padded(layouts[name], values)])

        def write(task: tuple[tuple[str, int], Iterator[np.ndarray | None]]) -> tuple[str, FileRecord]:
            (name, file), pieces = task
            path = layouts[name].file_name((unit, *[0] * (len(layouts[name].shape) - 2), file))
            cached = self._cached or name in small
            return path, _write_file(self.files, path, layouts[name], pieces, cached=cached)

        return dict(all_done(self._workers(), write, files.items()))

    def _create(
        self,
        plan: StorePlan,
        codec: str,
        outputs_dtype: str,
        wanted: Mapping[str, Any],
        left_out: Sequence[tuple[str, str]],
        numerics: Mapping[str, Any],
    ) -> None:
        n, k, unit = plan.n_examples, plan.n_outputs, plan.unit_size
        rows = ArrayLayout(
            name="rows",
            shape=(n, k, plan.n_columns),
            piece=(unit, k, plan.piece_columns),
            per_file=(1, 1, plan.pieces_per_file),
            dtype=storage_dtype(self.dtype),
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
            shape=(n, k, len(self.leaves)),
            piece=(unit, k, len(self.leaves)),
            per_file=(1, 1, 1),
            dtype="float64",
            codec="none",
            dimensions=("example", "output", "leaf"),
        )
        factors = [_operand_layout(operand, n, k, unit, self.dtype, codec) for operand in self.operands]
        layouts = [*([rows] if plan.n_columns else []), *factors, outputs, norms]
        constants = [constant_layout(constant) for constant in constants_of(self.leaves)]
        attributes = {
            "kind": "store",
            "N": n,
            "K": k,
            "P": sum(leaf.size for leaf in self.leaves),
            "operands": [operand.to_dict() for operand in self.operands],
            "leaves": [leaf.to_dict() for leaf in self.leaves],
            "left_out": [list(entry) for entry in left_out],
            "fingerprint": dict(wanted),
            "resolved": {
                "dtype": self.dtype,
                "codec": codec,
                "unit_size": unit,
                "arrays": [layout.to_dict() for layout in layouts],
                "numerics": {"storage": self.dtype, "norms": "float64", **numerics},
            },
            "versions": zarr_group.versions(),
        }
        groups = [*(["factors"] if factors else []), *([GROUP] if constants else [])]
        zarr_group.create(self.files, [*layouts, *constants], attributes, groups=groups)


def refuse_small_disk(where: str, plan: StorePlan) -> None:
    """Refuse a store whose rows are larger than the free space of its disk."""
    if where == "memory://" or is_address(where):
        return
    free = machine.free_disk(where)
    # Compression seldom halves float rows, and less can be promised of none.
    if plan.bytes_stored > free:
        raise InvalidRequestError(
            f"{where}: rows take {format_size(plan.bytes_stored)}, its disk has {format_size(free)} free; "
            "choose another disk (--out, out=), --dtype bfloat16 (dtype=) or fewer examples (--examples A:B, examples=)"
        )


def _is_bfloat16(array: np.ndarray) -> bool:
    """Whether these are bfloat16 numbers of the package ml_dtypes, as JAX gives them."""
    return array.dtype.name == "bfloat16"


def _shaped(given: np.ndarray, name: str, wanted: tuple[int, ...]) -> np.ndarray:
    """A real array of the wanted shape."""
    array = np.asarray(given)
    if array.shape != wanted or array.dtype.kind not in "fiub":
        raise InvalidRequestError(
            f"{name}: {array.dtype} of shape {array.shape}, allowed are real numbers of shape {wanted}"
        )
    return array.astype(np.float64) if name == "norms" else array


def _padded(layout: ArrayLayout, values: np.ndarray) -> np.ndarray:
    piece = np.full(layout.piece, layout.fill, layout.dtype)
    piece[: len(values)] = values
    return piece


def _write_file(
    files: Files, name: str, layout: ArrayLayout, pieces: Iterable[np.ndarray | None], *, cached: bool
) -> FileRecord:
    encoder = FileEncoder(layout)

    def buffers() -> Iterator[bytes | memoryview]:
        for piece in pieces:
            yield from encoder.encode(piece)
        yield from encoder.close()

    files.write(name, buffers(), cached)
    return encoder.record()


def factor_bytes(operands: Sequence[Operand], n_outputs: int, dtype: str) -> int:
    """Bytes of factors that come with each example."""
    itemsize = np.dtype(storage_dtype(dtype)).itemsize
    return sum(o.numbers(n_outputs) * (4 if o.integers else itemsize) for o in operands)


def _operand_layout(operand: Operand, n: int, k: int, unit: int, dtype: str, codec: str) -> ArrayLayout:
    """The array of an operand, cut by unit and by channel."""
    lead = operand.lead(k)
    stored = "int32" if operand.integers else storage_dtype(dtype)
    *middle, columns = operand.shape
    column_bytes = unit * math.prod([*lead, *middle]) * np.dtype(stored).itemsize
    width = min(columns, max(1, PIECE_BYTES // column_bytes))
    width = -(-columns // -(-columns // width))
    per_file = min(-(-columns // width), max(1, FILE_BYTES // (column_bytes * width)))
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


def request_of(
    leaves: Sequence[Leaf], n_examples: int, n_outputs: int, dtype: str, more: Mapping[str, Any]
) -> dict[str, Any]:
    """The request of a store; a store that was begun from another request is not continued."""
    return {
        "leaves": [[leaf.path, list(leaf.shape)] for leaf in leaves],
        "n_examples": n_examples,
        "n_outputs": n_outputs,
        "dtype": dtype,
        **more,
    }


def require_same(
    store: JacobianStore, wanted: Mapping[str, Any], leaves: Sequence[Leaf], unit_size: int | None
) -> None:
    """Refuse to continue a store that was begun from another request, by other terms or in other units.

    Raises
    ------
    RequestMismatchError
        Naming what differs.
    """
    compare_requested(store.path, store.requested, wanted)
    stored, given = ([leaf.with_constants(_any_content).terms for leaf in side] for side in (store.leaves, leaves))
    if stored != given:
        raise RequestMismatchError(
            f"{store.path}: its leaves are stored by other terms than these versions of jacstore and JAX find (it was "
            f"begun with JAX {store.versions.get('jax')}); use the first versions, or start over with --overwrite "
            "(overwrite=True)"
        )
    if unit_size is not None and min(unit_size, store.n_examples) != store.unit_size:
        raise RequestMismatchError(
            f"{store.path}: unit_size: {store.unit_size} -> {min(unit_size, store.n_examples)}; repeat the first "
            "--unit-size (unit_size=) or start over with --overwrite (overwrite=True)"
        )


def _any_content(constant: Constant) -> Constant:
    """Other machines and versions may round a constant otherwise: the first one is kept."""
    return replace(constant, digest="")


def _as_leaves(given: Sequence[Any] | Mapping[str, tuple[int, ...]]) -> tuple[Leaf, ...]:
    entries: list[Any] = list(given.items()) if isinstance(given, Mapping) else list(given)
    if entries and all(isinstance(entry, Leaf) for entry in entries):
        return tuple(entries)
    for path, shape in entries:
        if not all(isinstance(n, int | np.integer) and n >= 0 for n in shape):
            raise InvalidRequestError(
                f"leaf {path!r} of shape {tuple(shape)}; allowed are integers of at least 0 (leaves=)"
            )
    leaves = dense_leaves([(str(path), tuple(int(n) for n in shape), "float32") for path, shape in entries])
    if len({leaf.path for leaf in leaves}) < len(leaves):
        raise InvalidRequestError("leaves: two have the same path; each needs its own")
    return leaves


def _counts(given: Any) -> bool:
    return isinstance(given, int | np.integer) and not isinstance(given, bool) and bool(given >= 1)


def _units_of_part(n_units: int, part: tuple[int, int]) -> range:
    """Units of part I of N, counted from 1."""
    number, parts = part
    return range((number - 1) * n_units // parts, number * n_units // parts)

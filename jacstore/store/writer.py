"""Writes rows of examples, whoever computed them, a unit at a time, to disk or RAM, and marks what is durable.

Protocol of a unit: remove what a dead attempt left; write and flush its files; flush the folders; then one record with
the size and checksum of everything, put in place by rename. Only the record makes the unit exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from jacstore.errors import InvalidRequestError, NonFiniteError
from jacstore.storage import zarr_group
from jacstore.storage.buckets import is_address, requests
from jacstore.storage.chunks import ArrayLayout, FileEncoder, FileRecord
from jacstore.storage.files import Files, Memory
from jacstore.storage.ledger import Lock, sweep
from jacstore.store.arrays import array_layouts, factor_bytes, operand_array
from jacstore.store.constants import GROUP, constant_layout, constants_of, keep_constants
from jacstore.store.layout import StorePlan, plan_store
from jacstore.store.reader import JacobianStore
from jacstore.store.requests import request_of, require_same
from jacstore.store.unit_buffers import UnitBlock, storage_dtype
from jacstore.store.unit_form import UnitForm, shaped
from jacstore.terms.kinds import Leaf, Operand, dense_leaves

ARRAYS = ("rows", "factors", "constants", "outputs", "norms")
# The effect of rounding is looked at in one example of so many units.
ROUNDING_UNITS = 8


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
        self.form = UnitForm(leaves=self.leaves, operands=self.operands, n_outputs=self.store.n_outputs, dtype=dtype)
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
        arrays, factors = self.form.checked(rows, count)
        if norms is None:
            norms, proven = self.form.norms(arrays, factors), True
        else:
            norms, proven = shaped(norms, "norms", (count, self.store.n_outputs, len(self.leaves))), False
            if norms.min(initial=0) < 0:
                raise InvalidRequestError(f"norms: {norms.min():.3g}; they are squares, at least 0 (norms=)")
        if outputs is None:
            outputs = np.full((count, self.store.n_outputs), np.nan)
        else:
            outputs = shaped(outputs, "outputs", (count, self.store.n_outputs))
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
        nonfinite = [start + n for n in self.form.nonfinite(blocks, norms, proven)]
        if nonfinite and not self.allow_nonfinite:
            raise self._not_finite(nonfinite)
        for block in blocks.values():
            block.clear(count)
        small = {"outputs": outputs, "norms": norms}
        # Computed while the files wait for the disk.
        looked_at = unit % -(-store.n_units // ROUNDING_UNITS) == 0
        rounding = self._workers().submit(self.form.rounding, unit, blocks, norms) if looked_at else None
        files = self._write_files(unit, blocks, small)
        self.files.sync_folders(files)
        size = sum(record.size for record in files.values())
        seen = None if rounding is None else rounding.result()
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
                **({} if seen is None else {"rounding": seen}),
                "files": {name: record.to_list() for name, record in files.items()},
                **facts,
            },
        )
        self._done.add(unit)
        self.listener(UnitDone(unit=unit, examples=count, bytes_stored=size))

    def _not_finite(self, bad: Sequence[int]) -> NonFiniteError:
        """What to say of examples whose rows are not finite."""
        shown = ", ".join(map(str, bad[:10])) + (" and others" if len(bad) > 10 else "")
        return NonFiniteError(
            f"rows of example(s) {shown} hold NaN or infinity as {self.dtype}; mend or leave out those inputs, "
            "choose a wider --dtype (dtype=), or store them with --allow-nonfinite (allow_nonfinite=True)"
        )

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
        layouts = array_layouts(plan, len(self.leaves), self.operands, self.dtype, outputs_dtype, codec)
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
        groups = [*(["factors"] if self.operands else []), *([GROUP] if constants else [])]
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

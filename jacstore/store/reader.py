"""The public `JacobianStore`: rows, outputs, norms and facts of a store, every piece checked when it is read.

A unit is a run of consecutive examples and everything about them. It owns whole files; its record makes it exist.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import dask.array as da
import numpy as np

from jacstore.base.limits import LIMITS
from jacstore.base.precision import compute_dtype, stored_error
from jacstore.base.schema import Open, Reported, short_hash, typed
from jacstore.base.threads import all_done
from jacstore.errors import DamagedDataError, IncompleteError, InvalidRequestError
from jacstore.storage import zarr_group
from jacstore.storage.buckets import located
from jacstore.storage.chunks import ArrayLayout, FileRecord, check_file, decode, raw
from jacstore.storage.files import Files
from jacstore.storage.indexing import resolve
from jacstore.storage.ledger import FORMAT_VERSION, Ledger, readable, record_name
from jacstore.store.arrays import operand_array, operand_name
from jacstore.store.constants import StoredConstant, constant_bytes
from jacstore.store.layout import Side
from jacstore.store.metadata import StoreAttributes, check_store
from jacstore.store.reports import StoreInfo, leaf_table
from jacstore.store.unit_buffers import from_bfloat16
from jacstore.terms.kinds import Constant, Leaf, expand


@dataclass(frozen=True, kw_only=True)
class Rounding(Open):
    """The effect of rounding on kernel entries, observed in a row of a unit."""

    gain: float
    amplification: float
    measured: float


@dataclass(frozen=True, kw_only=True)
class UnitRecord(Open):
    """The fields of a unit's record that reading needs."""

    start: int
    stop: int
    bytes: int
    zero_rows: int
    # Numbers of the leaves whose part of every row is zero; missing in records of earlier versions.
    zero_leaves: tuple[int, ...] = ()
    nonfinite_examples: tuple[int, ...]
    files: dict[str, Any]
    rounding: Rounding | None = None
    # A hash of the inputs; rows that came from outside may have none, or a fact of that name.
    inputs: Any = None


# Where a window of a file begins, and its bytes; None where pieces are read one by one.
_Window = tuple[int, memoryview | None]


class JacobianStore:
    """A store opened for reading.

    Attributes
    ----------
    n_examples, n_outputs, n_parameters
        N, K and P. Row `n * K + k` belongs to example n and output k.
    leaves
        The selected parameter arrays in column order: path, shape, offset, terms.
    dtype
        Type of the stored rows: float32, bfloat16, float16 or float64.
    report
        Counts and seconds of the build that returned this store; empty if it was opened.
    """

    def __init__(self, files: Files, where: str) -> None:
        self.files = files
        self.path = where
        # What the build that returned this store says of itself.
        self.built: Reported | None = None
        attributes = zarr_group.read_attributes(files, where)
        if attributes["kind"] != "store":
            raise InvalidRequestError(f"{where} is a {attributes['kind']}, not a store; give the path of a store")
        try:
            found = typed(StoreAttributes, attributes)
            check_store(found)
        except DamagedDataError as error:
            raise DamagedDataError(f"{where}: its attributes are damaged: {error}") from error
        self._constants: dict[str, StoredConstant] = {}
        self.n_examples, self.n_outputs, self.n_parameters = found.N, found.K, found.P
        self.leaves = tuple(leaf.with_constants(self._stored) for leaf in found.leaves)
        self.operands = found.operands
        self.requested = found.fingerprint
        self.versions = found.versions
        self.left_out = [list(entry) for entry in found.left_out]
        self.choices = found.resolved
        self.dtype, self.unit_size = self.choices.dtype, self.choices.unit_size
        self.layouts = {layout.name: layout for layout in self.choices.arrays}
        # What was resolved with what other versions may have added to it: the hash and `info` are of all of it.
        self._numerics: dict[str, Any] = attributes["resolved"].get("numerics", {})
        owner = short_hash([attributes["fingerprint"], attributes["resolved"]])
        totals = dict.fromkeys(("unit", "suspect"), self.n_units)
        self.ledger = Ledger(files, owner, totals, sealed=found.sealed)
        self.decoded_bytes_read = 0
        self._records: dict[int, tuple[dict[str, Any], UnitRecord]] = {}
        self._lock = threading.Lock()
        self._scratch = threading.local()
        self._readers: ThreadPoolExecutor | None = None

    def _stored(self, constant: Constant) -> Constant:
        """A constant that is read when it is first needed."""
        known = self._constants.setdefault(constant.name, StoredConstant(self.files, self.path, constant))
        return replace(constant, source=known)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.files.address is None:
            raise InvalidRequestError(
                "a store in RAM cannot go to other processes; build it on disk (--out, out=) or use "
                "--scheduler threads (scheduler=)"
            )
        return (open_store, (self.files.address,))

    def __repr__(self) -> str:
        return (
            f"<JacobianStore {self.path}: {self.n_examples} examples x {self.n_outputs} outputs x "
            f"{self.n_parameters} parameters, {self.dtype}, {len(self.ledger.done('unit'))} of {self.n_units} units>"
        )

    @property
    def report(self) -> dict[str, Any]:
        """The keys of `jacstore build --json`; empty if this store was opened."""
        return {} if self.built is None else self.built.to_dict()

    @property
    def n_units(self) -> int:
        return -(-self.n_examples // self.unit_size)

    @property
    def complete(self) -> bool:
        """Whether every unit has a record."""
        return len(self.ledger.done("unit")) == self.n_units

    @property
    def side(self) -> Side:
        """The facts of this store that a gram plan needs."""
        rows = self.layouts.get("rows")
        return Side(
            n_examples=self.n_examples,
            unit_size=self.unit_size,
            piece_columns=rows.piece[2] if rows else 1,
            itemsize=rows.itemsize if rows else 4,
        )

    @property
    def numerics(self) -> dict[str, Any]:
        """The types of storage, computing, products and sums, and the device, which decided the digits."""
        return self._numerics

    @property
    def lowest(self) -> str:
        """The lowest precision in the function; if unknown, the type that rows of the stored type are computed in."""
        return self.choices.numerics.lowest or compute_dtype(self.dtype)

    @property
    def rounding(self) -> dict[str, Any]:
        """The largest effect of rounding on kernel entries that was observed in some rows of some units.

        `gain` is None if no row was looked at.
        """
        return _largest_rounding(self.unit(unit) for unit in self.ledger.done("unit"))

    @property
    def n_columns(self) -> int:
        """Columns stored as rows: P without factored leaves."""
        return self.layouts["rows"].shape[2] if "rows" in self.layouts else 0

    @property
    def bytes_decoded(self) -> int:
        """Decoded bytes of all rows and factors."""
        names = [name for name in self.layouts if name not in ("outputs", "norms")]
        return sum(math.prod(self.layouts[name].shape) * self.layouts[name].itemsize for name in names)

    @property
    def factor_bytes(self) -> int:
        """Decoded bytes of an example's factors."""
        layouts = [self.layouts[operand_array(operand.name)] for operand in self.operands]
        return sum(math.prod(layout.shape[1:]) * layout.itemsize for layout in layouts)

    @property
    def nonfinite_examples(self) -> list[int]:
        """Examples that were stored with NaN or infinity in their rows."""
        return [n for unit in self.ledger.done("unit") for n in self.unit(unit).nonfinite_examples]

    @property
    def outputs(self) -> np.ndarray:
        """Outputs `(N, K)` of the function at each example."""
        return self._whole("outputs")

    @property
    def norms(self) -> np.ndarray:
        """Squared row norms for each leaf, float64 `(N, K, L)`, taken before rows were rounded for storage."""
        return self._whole("norms")

    def norms_of(self, start: int, stop: int) -> np.ndarray:
        """`norms` of examples `start` to `stop`."""
        found = np.empty((stop - start, *self.layouts["norms"].shape[1:]))
        self.read("norms", start, stop, 0, found.shape[-1], found)
        return found

    @property
    def array(self) -> da.Array:
        """All of J as a lazy Dask array `(N * K, P)`, whatever its terms; a chunk is at most a unit by 64 MB."""
        unit_rows = self.unit_size * self.n_outputs
        width = max(1, min(LIMITS.file_bytes // (4 * unit_rows), self.n_parameters))
        if "rows" in self.layouts and not self.operands:
            rows = self.layouts["rows"]
            width = min(rows.piece[2] * rows.per_file[2], self.n_parameters)
        name = f"jacstore-rows-{self.identity()}"
        return da.from_array(_LazyRows(self), chunks=(unit_rows, width), name=name, asarray=False)

    def identity(self) -> str:
        """A hash of the request and of every stored byte: equal only for equal stores."""
        records = [self.unit(unit).files for unit in self.ledger.done("unit")]
        return short_hash([self.requested, records])

    def record(self, unit: int) -> dict[str, Any]:
        """The record of a finished unit as it was written, with the facts that its writer added."""
        return self._read_record(unit)[0]

    def unit(self, unit: int) -> UnitRecord:
        """What the record of a finished unit says, as reading needs it.

        Raises
        ------
        DamagedDataError
            If it is missing, or cannot be about this unit.
        """
        return self._read_record(unit)[1]

    def _read_record(self, unit: int) -> tuple[dict[str, Any], UnitRecord]:
        with self._lock:
            found = self._records.get(unit)
        if found is None:
            try:
                written = self.ledger.read("unit", unit)
                found = written, self._checked_record(unit, written)
            except DamagedDataError as error:
                raise DamagedDataError(
                    f"{self.path}: the record of unit {unit} is damaged: {error}; run the same build again to "
                    "recompute this unit"
                ) from error
            with self._lock:
                self._records[unit] = found
        return found

    def _checked_record(self, unit: int, written: dict[str, Any]) -> UnitRecord:
        """Refuse a record that does not fit this unit: other examples, other files, or impossible sizes."""
        record = typed(UnitRecord, written)
        start, stop = self.unit_range(unit)
        if (record.start, record.stop) != (start, stop):
            raise DamagedDataError(f"it is about examples {record.start} to {record.stop - 1}")
        expected = {
            layout.file_name((unit, *[0] * (len(layout.shape) - 2), file)): (layout, file)
            for layout in self.layouts.values()
            for file in range(layout.files_along(-1))
        }
        if set(record.files) != set(expected):
            raise DamagedDataError("it lists other files than those of its unit")
        for name, facts in record.files.items():
            layout, file = expected[name]
            layout.check_record(facts, file, name)
        if not all(start <= n < stop for n in record.nonfinite_examples):
            raise DamagedDataError("it names examples that are not the unit's")
        return record

    def require_complete(self) -> None:
        """Refuse to go on with a store that is not finished.

        Raises
        ------
        IncompleteError
            With the number of missing units.
        """
        missing = self.n_units - len(self.ledger.done("unit"))
        if missing:
            raise IncompleteError(
                f"{self.path} is incomplete: {missing} of {self.n_units} units missing; complete it by running the "
                f"same build again: jacstore build TARGET --out {self.path}"
            )

    def info(self) -> dict[str, Any]:
        """Sizes, choices and state, as `jacstore info --json` prints them; a unit with a damaged record is not done."""
        return self.summary().to_dict()

    def summary(self) -> StoreInfo:
        """The same as a value."""
        records, damaged = readable(self.unit, self.ledger.done("unit"))
        return StoreInfo(
            store=self.path,
            examples=self.n_examples,
            outputs=self.n_outputs,
            parameters=self.n_parameters,
            leaves=leaf_table(self.leaves, self.operands, self.n_outputs),
            left_out=self.left_out,
            units_total=self.n_units,
            units_done=len(records),
            units_damaged=damaged,
            bytes_stored=sum(record.bytes for record in records) + constant_bytes(self.leaves),
            bytes_dense=self.n_examples * self.n_outputs * self.n_parameters * 4,
            zero_rows=sum(record.zero_rows for record in records),
            zero_leaves=self._zero_leaves(records),
            nonfinite_examples=[n for record in records for n in record.nonfinite_examples],
            complete=len(records) == self.n_units,
            format_version=FORMAT_VERSION,
            fingerprint=self.requested,
            dtype=self.dtype,
            codecs=sorted({layout.codec for layout in self.layouts.values()}),
            versions=self.versions,
            numerics=self._errors(records),
        )

    def _zero_leaves(self, records: list[UnitRecord]) -> list[str]:
        """Paths of the leaves whose part of every row so far is zero."""
        zero = set.intersection(*(set(record.zero_leaves) for record in records)) if records else set()
        return [leaf.path for n, leaf in enumerate(self.leaves) if n in zero]

    def _errors(self, records: list[UnitRecord]) -> dict[str, Any]:
        """The numerical record with what rounding for storage does to kernel entries, relative to sqrt(G_ii G_jj)."""
        rounding = _largest_rounding(records)
        expected, worst = stored_error(self.dtype, self.lowest, rounding)
        seen = rounding["measured"]
        return {**self.numerics, "expected_error": expected, "worst_case": worst, "measured_error": seen}

    def read_rows(self, start: int, stop: int, first: int, last: int, out: np.ndarray) -> None:
        """Read columns `first` to `last` of J for examples `start` to `stop` into `out`: `(n, K, columns)`.

        Columns of factored leaves are computed from their factors. `out` may have another float type than the store;
        each value is converted once. Every piece is checked against the ledger.

        Raises
        ------
        DamagedDataError
            Naming unit and leaf of the first piece that is missing or differs from its record.
        """
        for leaf, a, b in self._runs(first, last):
            target = out[..., a - first : b - first]
            if leaf.dense:
                shift = leaf.dense.start - leaf.offset
                self.read("rows", start, stop, a + shift, b + shift, target)
                continue
            # One unit at a time keeps the leaf's whole rows small.
            for m in range(start, stop, self.unit_size):
                n = min(m + self.unit_size, stop)
                factors = {name: self.read_operand(name, m, n) for name in leaf.operands}
                rows = expand(leaf.terms, factors, leaf.size)
                target[m - start : n - start] = rows[..., a - leaf.offset : b - leaf.offset]

    def _runs(self, first: int, last: int) -> list[tuple[Leaf, int, int]]:
        """Columns `first` to `last` leaf by leaf; leaves that are stored as rows side by side are one run."""
        runs: list[tuple[Leaf, int, int]] = []
        for leaf in self.leaves:
            a, b = max(first, leaf.offset), min(last, leaf.offset + leaf.size)
            if a >= b:
                continue
            if runs and leaf.dense and runs[-1][0].dense and runs[-1][2] == a:
                runs[-1] = (runs[-1][0], runs[-1][1], b)
            else:
                runs.append((leaf, a, b))
        return runs

    def read_operand(
        self, name: str, start: int, stop: int, dtype: Any = None, empty: Callable[..., np.ndarray] = np.empty
    ) -> np.ndarray:
        """An operand of examples `start` to `stop`, `(n, ...)` or `(n, K, ...)`; bfloat16 as float32.

        `empty(shape, dtype)` gives the memory for it.
        """
        layout = self.layouts[operand_array(name)]
        stored = np.dtype("float32" if layout.dtype == "uint16" else layout.dtype)
        dtype = stored if dtype is None or stored.kind == "i" else dtype
        out = empty((stop - start, *layout.shape[1:]), dtype)
        self.read(operand_array(name), start, stop, 0, layout.shape[-1], out)
        return out

    def read(self, array: str, start: int, stop: int, first: int, last: int, out: np.ndarray) -> None:
        """Read columns `first` to `last` of a stored array's last axis for a range of examples, all else whole.

        Files are read by several threads, each piece checked against the ledger. What a region needs of an object in a
        bucket is one request.
        """
        layout = self.layouts[array]
        file_columns = layout.piece[-1] * layout.per_file[-1]
        tasks = [
            (unit, file)
            for unit in range(start // self.unit_size, -(-stop // self.unit_size))
            for file in range(first // file_columns, -(-last // file_columns))
        ]
        if self._readers is None:
            self._readers = ThreadPoolExecutor(self.files.at_once, "jacstore-read")
        region = (start, stop, first, last)
        all_done(self._readers, lambda task: self._read_file(layout, task[0], task[1], region, out), tasks)

    def _read_file(
        self, layout: ArrayLayout, unit: int, file: int, region: tuple[int, int, int, int], out: np.ndarray
    ) -> None:
        """Read what one file holds of a region."""
        start, stop, first, last = region
        at = (unit, *[0] * (len(layout.shape) - 2), file)
        name = layout.file_name(at)
        listed = self._file_facts(unit, name)
        unit_start = unit * self.unit_size
        a, b = max(start, unit_start), min(stop, unit_start + self.unit_size)
        width = layout.piece[-1]
        piece = self._buffer("piece", layout.piece, layout.dtype)
        # Read with its first piece, so that what is wrong with the file is said of a place in it.
        window: _Window = (0, None)
        left_in_window, most = 0, max(1, LIMITS.window_bytes // layout.piece_bytes)
        for index, where in layout.pieces_within(at, first, last):
            left = where[-1].start
            c, d = max(first, left), min(last, where[-1].stop)
            if c >= d:
                continue
            try:
                if not left_in_window:
                    ahead = layout.pieces_within(at, max(first, left), last)
                    wanted = [n for n, _ in itertools.islice(ahead, most)]
                    window, left_in_window = self._window(name, listed, wanted), len(wanted)
                left_in_window -= 1
                self._read_piece(name, FileRecord.piece_of(listed, index), layout, piece, window)
            except DamagedDataError as error:
                self.mark(unit)
                raise self._damaged(unit, layout.name, where[-1], str(error)) from error
            values = piece[a - unit_start : b - unit_start, ..., c - left : d - left]
            target = out[a - start : b - start, ..., c - first : d - first]
            bits = self.dtype == "bfloat16" and layout.dtype == "uint16" and out.dtype != np.uint16
            target[...] = from_bfloat16(values) if bits else values
            examples = min(self.unit_size, self.n_examples - unit_start)
            columns = min(width, layout.shape[-1] - left)
            count = examples * math.prod(layout.shape[1:-1]) * columns * layout.itemsize
            with self._lock:
                self.decoded_bytes_read += count

    def _window(self, name: str, listed: list[Any], wanted: list[int]) -> _Window:
        """The bytes of neighbouring pieces of a file, where that is read by one request."""
        start = FileRecord.piece_of(listed, wanted[0])[0]
        offset, size, _ = FileRecord.piece_of(listed, wanted[-1])
        return start, self.files.window(name, start, offset + size)

    def _read_piece(
        self,
        name: str,
        record: tuple[int, int, int],
        layout: ArrayLayout,
        piece: np.ndarray,
        window: _Window = (0, None),
    ) -> None:
        offset, size, _ = record
        start, held = window
        if held is not None:
            decode(held[offset - start : offset - start + size], record, piece, layout, name)
            return
        if layout.codec == "none" and size == piece.nbytes:
            body = raw(piece)
        else:
            body = raw(self._buffer("body", (size,), "uint8"))
        self.files.read_into(name, [(offset, body)])
        decode(body, record, piece, layout, name)

    def _buffer(self, key: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Memory of this thread that is used again and again."""
        held = getattr(self._scratch, key, None)
        if held is None or held.nbytes < math.prod(shape) * np.dtype(dtype).itemsize:
            held = np.empty(math.prod(shape) * np.dtype(dtype).itemsize, np.uint8)
            setattr(self._scratch, key, held)
        return held[: math.prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)

    def _file_facts(self, unit: int, name: str) -> list[Any]:
        facts: list[Any] = self.unit(unit).files[name]
        return facts

    def _damaged(self, unit: int, array: str, columns: slice, what: str) -> DamagedDataError:
        start, stop = self.unit_range(unit)
        if array == "rows":
            places = [(f.path, f.dense) for f in self.leaves if f.dense]
            leaves = [p for p, d in places if d and d.start < columns.stop and columns.start < d.start + d.size]
        else:
            leaves = [f.path for f in self.leaves if operand_name(array) in f.operands] or [f.path for f in self.leaves]
        named = leaves[0] if len(leaves) == 1 else f"{leaves[0]} to {leaves[-1]}"
        return DamagedDataError(
            f"{self.path}: unit {unit} (examples {start} to {stop - 1}), leaf {named}: {what}; "
            "run the same build again to recompute this unit"
        )

    def mark(self, unit: int, wrong: bool = False) -> None:
        """Leave a note that makes the next build check this unit's bytes; a failure to write it is ignored.

        With `wrong` the build recomputes the unit although its bytes match the record if the record is the same.
        """
        with contextlib.suppress(OSError, InvalidRequestError, DamagedDataError):
            if wrong:
                self.ledger.record("suspect", unit, {"wrong": short_hash(self.record(unit))})
            elif self.files.size(record_name("suspect", unit)) is None:
                self.ledger.record("suspect", unit, {})

    def must_recompute(self, unit: int) -> bool:
        """Whether a unit with a note is wrong, in its bytes or as it is recorded."""
        with contextlib.suppress(DamagedDataError):
            note = self.ledger.read("suspect", unit)
            if note.get("wrong") == short_hash(self.record(unit)):
                return True
        return self.check_unit(unit) is not None

    def unit_range(self, unit: int) -> tuple[int, int]:
        """Examples of a unit."""
        return unit * self.unit_size, min((unit + 1) * self.unit_size, self.n_examples)

    def check_unit(self, unit: int) -> str | None:
        """The first thing that is wrong with a unit, or None."""
        return next(self.faults(unit), None)

    def files_of(self, unit: int) -> dict[str, tuple[ArrayLayout, tuple[int, ...]]]:
        """Every file that a unit owns, with its array and its place in the array's grid."""
        places = [
            (layout, (unit, *[0] * (len(layout.shape) - 2), file))
            for layout in self.layouts.values()
            for file in range(layout.files_along(-1))
        ]
        return {layout.file_name(at): (layout, at) for layout, at in places}

    def faults(self, unit: int) -> Iterator[str]:
        """What is wrong with a unit, file by file: its record, and every byte of every file against that record."""
        whole = slice(0, self.n_parameters)
        try:
            files = self.unit(unit).files
        except DamagedDataError as error:
            yield str(error)
            return
        expected = self.files_of(unit)
        for name in sorted(set(files) - set(expected)):
            yield str(self._damaged(unit, "", whole, f"its record lists {name}, which is no file of this unit"))
        for name, (layout, at) in expected.items():
            columns = whole
            try:
                record = FileRecord.from_list(self._file_facts(unit, name))
                size = self.files.size(name)
                if size is None:
                    raise DamagedDataError(f"{name} is missing")
                if size > record.size:
                    # It may be larger than memory.
                    raise DamagedDataError(f"{name} has {size} bytes, recorded were {record.size}")
                data = raw(np.empty(size, np.uint8))
                self.files.read_into(name, [(0, data)])
                check_file(data, record, layout, name)
            except DamagedDataError as error:
                if error.piece is not None:
                    columns = next(itertools.islice(layout.pieces_of(at), error.piece, None))[-1]
                yield str(self._damaged(unit, layout.name, columns, str(error)))

    def sizes_match(self, unit: int) -> bool:
        """Whether all files of a unit have the recorded size: a cheap check that finds missing and torn files."""
        try:
            return all(self.files.size(name) == facts[0] for name, facts in self.unit(unit).files.items())
        except DamagedDataError:
            return False

    def _whole(self, array: str) -> np.ndarray:
        """A small array in memory; missing units are NaN."""
        layout = self.layouts[array]
        out = np.full(layout.shape, layout.fill, layout.dtype)
        piece = np.empty(layout.piece, layout.dtype)
        for unit in self.ledger.done("unit"):
            at = (unit,) + (0,) * (len(layout.shape) - 1)
            name = layout.file_name(at)
            record = FileRecord.from_list(self._file_facts(unit, name)).pieces[0]
            try:
                self._read_piece(name, record, layout, piece)
            except DamagedDataError as error:
                self.mark(unit)
                raise self._damaged(unit, array, slice(0, self.n_parameters), str(error)) from error
            where = next(layout.pieces_of(at))
            out[where] = piece[tuple(slice(0, s.stop - s.start) for s in where)]
        return out


class _LazyRows:
    """J as an array-like for Dask: `shape`, `dtype`, `ndim`, `__getitem__`."""

    ndim = 2

    def __init__(self, store: JacobianStore) -> None:
        self.store = store
        self.shape = (store.n_examples * store.n_outputs, store.n_parameters)
        self.dtype = np.dtype("float32" if store.dtype == "bfloat16" else store.dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        ((a, b), (c, d)), within = resolve(index, self.shape)
        if a == b or c == d:
            return np.empty((b - a, d - c), self.dtype)[within]
        k = self.store.n_outputs
        start, stop = a // k, -(-b // k)
        self.store.require_complete()
        block = np.empty((stop - start, k, d - c), self.dtype)
        self.store.read_rows(start, stop, c, d, block)
        picked: np.ndarray = block.reshape(-1, d - c)[a - start * k : b - start * k][within]
        return picked


def _largest_rounding(records: Iterable[UnitRecord]) -> dict[str, Any]:
    """The largest effect of rounding over units, as in `JacobianStore.rounding`."""
    seen = [record.rounding for record in records if record.rounding is not None]
    largest: dict[str, Any] = {"gain": None, "amplification": 1.0, "measured": None}
    return {key: max((getattr(facts, key) for facts in seen), default=unknown) for key, unknown in largest.items()}


def open_store(path: str) -> JacobianStore:
    """Open a store on disk or in a bucket."""
    return JacobianStore(located(path), str(path))

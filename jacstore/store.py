"""In: rows of examples, a unit at a time. Out: a store on disk or in RAM, and rows read back, every piece checked.

A unit is a run of consecutive examples and everything about them. It owns whole files; its record, written last, is what
makes it exist.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np

from jacstore import hierarchy, machine
from jacstore.errors import Damaged, Incomplete, Mismatch, NonFinite, Refused
from jacstore.files import Files, Folder
from jacstore.ledger import FOLDER, Ledger, Lock, compare_requested
from jacstore.machine import format_size
from jacstore.pieces import CODECS, ArrayLayout, FileEncoder, FileRecord, decode
from jacstore.plan import IO_THREADS, Side, StorePlan, plan_store
from jacstore.progress import Listener, UnitDone, silent
from jacstore.terms import Leaf, dense_leaves

DTYPES = ("float32", "bfloat16", "float16", "float64")
ARRAYS = ("rows", "outputs", "norms")


def storage_dtype(dtype: str) -> str:
    """The type in the file: bfloat16 is stored as uint16, Zarr has no such type."""
    return "uint16" if dtype == "bfloat16" else dtype


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float values to bfloat16, nearest even, as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    # Rounding must not carry a NaN into infinity.
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bfloat16 stored as uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class JacobianStore:
    """A store opened for reading.

    Attributes
    ----------
    n_examples, n_outputs, n_parameters
        N, K and P. Row `n * K + k` belongs to example n and output k.
    leaves
        The selected parameter arrays in column order: path, shape, offset, terms.
    dtype
        What rows are stored as: float32, bfloat16, float16 or float64.
    report
        Counts and seconds of the build that returned this store; empty if it was opened.
    """

    def __init__(self, files: Files, where: str) -> None:
        self.files = files
        self.path = where
        self.report: dict[str, Any] = {}
        attributes = hierarchy.read_attributes(files, where)
        if attributes["kind"] != "store":
            raise Refused(f"{where} is a {attributes['kind']}, not a store; give the path of a store")
        try:
            self.n_examples = int(attributes["N"])
            self.n_outputs = int(attributes["K"])
            self.n_parameters = int(attributes["P"])
            self.leaves = tuple(Leaf.from_dict(leaf) for leaf in attributes["leaves"])
            self.requested: dict[str, Any] = attributes["fingerprint"]
            self.resolved: dict[str, Any] = attributes["resolved"]
            self.versions: dict[str, str] = attributes["versions"]
            self.left_out: list[list[str]] = attributes["left_out"]
            self.dtype: str = self.resolved["dtype"]
            self._layouts = {layout["name"]: ArrayLayout.from_dict(layout) for layout in self.resolved["arrays"]}
            self.unit_size = int(self.resolved["unit_size"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"{where}: its attributes are damaged ({type(error).__name__}: {error})") from error
        self.ledger = Ledger(files)
        self.decoded_bytes_read = 0
        self._records: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._scratch = threading.local()
        self._readers: ThreadPoolExecutor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if not isinstance(self.files, Folder):
            raise Refused(
                "a store in RAM cannot go to other processes; build it on disk (--out, out=) or use "
                "--scheduler threads (scheduler=)"
            )
        return (open_store, (self.path,))

    def __repr__(self) -> str:
        return (
            f"<JacobianStore {self.path}: {self.n_examples} examples x {self.n_outputs} outputs x "
            f"{self.n_parameters} parameters, {self.dtype}, {len(self.ledger.done('unit'))} of {self.n_units} units>"
        )

    @property
    def n_units(self) -> int:
        return -(-self.n_examples // self.unit_size)

    @property
    def complete(self) -> bool:
        """Whether every unit has a record."""
        return len(self.ledger.done("unit")) == self.n_units

    @property
    def side(self) -> Side:
        """What a gram plan needs to know of this store."""
        rows = self._layouts["rows"]
        return Side(
            n_examples=self.n_examples, unit_size=self.unit_size, piece_columns=rows.piece[2], itemsize=rows.itemsize
        )

    @property
    def bytes_decoded(self) -> int:
        """Decoded bytes of all rows."""
        return self.n_examples * self.n_outputs * self.n_parameters * self._layouts["rows"].itemsize

    @property
    def outputs(self) -> np.ndarray:
        """Outputs `(N, K)` of the function at each example."""
        return self._whole("outputs")

    @property
    def norms(self) -> np.ndarray:
        """Squared row norms for each leaf, float64 `(N, K, L)`, taken before rows were rounded for storage."""
        return self._whole("norms")

    @property
    def array(self) -> da.Array:
        """All of J as a lazy Dask array `(N * K, P)`; a chunk is a unit by the columns of a file."""
        rows = self._layouts["rows"]
        unit_rows = self.unit_size * self.n_outputs
        width = min(rows.piece[2] * rows.per_file[2], self.n_parameters)
        name = f"jacstore-rows-{self.identity()}"
        return da.from_array(_LazyRows(self), chunks=(unit_rows, width), name=name, asarray=False)

    def identity(self) -> str:
        """A hash of the request and of every stored byte: equal only for equal stores."""
        records = [self.record(unit)["files"] for unit in self.ledger.done("unit")]
        return hierarchy.short_hash([self.requested, records])

    def record(self, unit: int) -> dict[str, Any]:
        """The record of a finished unit."""
        with self._lock:
            found = self._records.get(unit)
        if found is None:
            found = self.ledger.read("unit", unit)
            if not isinstance(found.get("files"), dict):
                raise Damaged(f"the record of unit {unit} is damaged")
            with self._lock:
                self._records[unit] = found
        return found

    def require_complete(self) -> None:
        """Refuse to go on with a store that is not finished.

        Raises
        ------
        Incomplete
            With the number of missing units.
        """
        missing = self.n_units - len(self.ledger.done("unit"))
        if missing:
            raise Incomplete(
                f"{self.path} is incomplete: {missing} of {self.n_units} units missing; complete it by running the "
                f"same build again: jacstore build TARGET --out {self.path}"
            )

    def info(self) -> dict[str, Any]:
        """Sizes, choices and state, as `jacstore info --json` prints them."""
        done = self.ledger.done("unit")
        records = [self.record(unit) for unit in done]
        return {
            "store": self.path,
            "examples": self.n_examples,
            "outputs": self.n_outputs,
            "parameters": self.n_parameters,
            "leaves": [
                {"path": leaf.path, "shape": list(leaf.shape), "terms": [term.kind for term in leaf.terms]}
                for leaf in self.leaves
            ],
            "left_out": self.left_out,
            "units_total": self.n_units,
            "units_done": len(done),
            "bytes_stored": sum(record["bytes"] for record in records),
            "bytes_dense": self.n_examples * self.n_outputs * self.n_parameters * 4,
            "zero_rows": sum(record["zero_rows"] for record in records),
            "nonfinite_examples": [n for record in records for n in record["nonfinite_examples"]],
            "complete": len(done) == self.n_units,
            "format_version": hierarchy.FORMAT_VERSION,
            "fingerprint": self.requested,
            "dtype": self.dtype,
            "codecs": sorted({layout.codec for layout in self._layouts.values()}),
            "versions": self.versions,
        }

    def read_rows(self, start: int, stop: int, first: int, last: int, out: np.ndarray) -> None:
        """Read columns `first` to `last` of examples `start` to `stop` into `out` `(stop - start, K, last - first)`.

        `out` may have another float type than the store; each value is converted once. Every piece is checked against
        the ledger. Pieces are read by `IO_THREADS` threads.

        Raises
        ------
        Damaged
            Naming unit and leaf of the first piece that is missing or differs from its record.
        """
        layout = self._layouts["rows"]
        file_columns = layout.piece[2] * layout.per_file[2]
        tasks = [
            (unit, file)
            for unit in range(start // self.unit_size, -(-stop // self.unit_size))
            for file in range(first // file_columns, -(-last // file_columns))
        ]
        if self._readers is None:
            self._readers = ThreadPoolExecutor(IO_THREADS, "jacstore-read")
        region = (start, stop, first, last)
        for _ in self._readers.map(lambda task: self._read_file(*task, region, out), tasks):
            pass

    def _read_file(self, unit: int, file: int, region: tuple[int, int, int, int], out: np.ndarray) -> None:
        """Read what one file holds of a region."""
        start, stop, first, last = region
        layout = self._layouts["rows"]
        name = layout.file_name((unit, 0, file))
        listed = FileRecord.from_list(self._file_facts(unit, name))
        unit_start = unit * self.unit_size
        a, b = max(start, unit_start), min(stop, unit_start + self.unit_size)
        width = layout.piece[2]
        piece = self._buffer("piece", layout.piece, layout.dtype)
        for index, where in enumerate(layout.pieces_of((unit, 0, file))):
            c, d = max(first, where[2].start), min(last, where[2].stop)
            if c >= d:
                continue
            try:
                self._read_piece(name, listed.pieces[index], layout, piece)
            except (Damaged, IndexError) as error:
                self._suspect(unit)
                raise self._damaged(unit, where[2], str(error)) from error
            left = where[2].start
            values = piece[a - unit_start : b - unit_start, :, c - left : d - left]
            target = out[a - start : b - start, :, c - first : d - first]
            target[...] = from_bfloat16(values) if self.dtype == "bfloat16" and out.dtype != np.uint16 else values
            examples = min(self.unit_size, self.n_examples - unit_start)
            count = examples * self.n_outputs * min(width, self.n_parameters - left) * layout.itemsize
            with self._lock:
                self.decoded_bytes_read += count

    def _read_piece(self, name: str, record: tuple[int, int, int], layout: ArrayLayout, piece: np.ndarray) -> None:
        offset, size, _ = record
        if layout.codec == "none" and size == piece.nbytes:
            body = memoryview(piece.reshape(-1).view(np.uint8))
        else:
            body = memoryview(self._buffer("body", (size,), "uint8"))
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
        try:
            return self.record(unit)["files"][name]
        except KeyError:
            raise Damaged(f"the record of unit {unit} does not list {name}") from None

    def _damaged(self, unit: int, columns: slice, what: str) -> Damaged:
        start, stop = self.unit_range(unit)
        leaves = [f.path for f in self.leaves if f.offset < columns.stop and columns.start < f.offset + f.size]
        named = leaves[0] if len(leaves) == 1 else f"{leaves[0]} to {leaves[-1]}"
        return Damaged(
            f"{self.path}: unit {unit} (examples {start} to {stop - 1}), leaf {named}: {what}; "
            "run the same build again to recompute this unit"
        )

    def _suspect(self, unit: int) -> None:
        """Leave a note that makes the next build check this unit's bytes; never worth failing for."""
        with contextlib.suppress(OSError, Refused):
            self.files.publish(f"{FOLDER}/suspect-{unit:07d}.json", b"{}")

    def unit_range(self, unit: int) -> tuple[int, int]:
        """Examples of a unit."""
        return unit * self.unit_size, min((unit + 1) * self.unit_size, self.n_examples)

    def check_unit(self, unit: int) -> str | None:
        """What is wrong with a unit's bytes, or None: every piece of every file against its record."""
        try:
            files = self.record(unit)["files"]
            for name, facts in files.items():
                layout = self._layouts[name.split("/", 1)[0]]
                listed = FileRecord.from_list(facts)
                if self.files.size(name) != listed.size:
                    return f"{name} has {self.files.size(name)} bytes, recorded were {listed.size}"
                for record in listed.pieces:
                    if record[1]:
                        self._read_piece(name, record, layout, self._buffer("piece", layout.piece, layout.dtype))
        except (Damaged, KeyError, TypeError, ValueError) as error:
            return str(error)
        return None

    def sizes_match(self, unit: int) -> bool:
        """Whether all files of a unit are there with the recorded size: cheap, sees what is missing or torn."""
        try:
            return all(self.files.size(name) == facts[0] for name, facts in self.record(unit)["files"].items())
        except (Damaged, TypeError, IndexError):
            return False

    def _whole(self, array: str) -> np.ndarray:
        """A small array in memory; what is missing is NaN."""
        layout = self._layouts[array]
        out = np.full(layout.shape, layout.fill, layout.dtype)
        piece = np.empty(layout.piece, layout.dtype)
        for unit in self.ledger.done("unit"):
            at = (unit,) + (0,) * (len(layout.shape) - 1)
            name = layout.file_name(at)
            record = FileRecord.from_list(self._file_facts(unit, name)).pieces[0]
            try:
                self._read_piece(name, record, layout, piece)
            except Damaged as error:
                self._suspect(unit)
                raise self._damaged(unit, slice(0, self.n_parameters), str(error)) from error
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

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows, columns = (range(*s.indices(n)) for s, n in zip(index, self.shape, strict=True))
        if not len(rows) or not len(columns):
            return np.empty((len(rows), len(columns)), self.dtype)
        k = self.store.n_outputs
        a, b = min(rows[0], rows[-1]), max(rows[0], rows[-1]) + 1
        c, d = min(columns[0], columns[-1]), max(columns[0], columns[-1]) + 1
        start, stop = a // k, -(-b // k)
        self.store.require_complete()
        block = np.empty((stop - start, k, d - c), self.dtype)
        self.store.read_rows(start, stop, c, d, block)
        flat = block.reshape(-1, d - c)[a - start * k : b - start * k]
        return flat[:: 1 if rows.step > 0 else -1][:: abs(rows.step), :][:, :: columns.step]


def open_store(path: str) -> JacobianStore:
    """Open a store on disk."""
    return JacobianStore(Folder(path), str(path))


class StoreWriter:
    """The public door for rows, whoever computes them: `with StoreWriter(...) as writer: writer.write_unit(...)`.

    Opening it again with the same arguments continues; `missing` lists what is left.

    Parameters
    ----------
    path
        Folder of the store; None or "memory://" for RAM.
    leaves
        `(path, shape)` pairs or a mapping, in column order; or `Leaf` objects.
    n_examples, n_outputs
        N and K.
    dtype, codec, unit_size, memory
        As for `jacstore.build`. `codec` is none, lz4 or zstd.
    requested
        Further facts that decide the rows; opening the store again with others is refused.
    """

    def __init__(
        self,
        path: str | Path | None,
        leaves: Sequence[Any] | Mapping[str, tuple[int, ...]],
        n_examples: int,
        n_outputs: int,
        *,
        dtype: str = "float32",
        codec: str = "none",
        unit_size: int | None = None,
        memory: int | str | None = None,
        outputs_dtype: str = "float64",
        requested: Mapping[str, Any] | None = None,
        left_out: Sequence[tuple[str, str]] = (),
        part: tuple[int, int] = (1, 1),
        allow_nonfinite: bool = False,
        overwrite: bool = False,
        listener: Listener = silent,
    ) -> None:
        self.leaves = _as_leaves(leaves)
        budget = machine.default_memory(memory)
        if dtype not in DTYPES:
            raise Refused(f"--dtype {dtype}: allowed are {', '.join(DTYPES)} (dtype=)")
        if codec not in CODECS:
            raise Refused(f"--codec {codec}: allowed are {', '.join(CODECS)} (codec=)")
        if n_examples < 1 or n_outputs < 1 or not self.leaves:
            raise Refused(f"{n_examples} examples x {n_outputs} outputs x {len(self.leaves)} leaves: none may be 0")
        if unit_size is not None and unit_size < 1:
            raise Refused(f"--unit-size {unit_size}: must be at least 1 (unit_size=)")
        self.where = "memory://" if path is None else str(path)
        self.files = hierarchy.place(path, budget)
        self.dtype, self.listener, self.allow_nonfinite = dtype, listener, allow_nonfinite
        wanted = {
            "leaves": [[leaf.path, list(leaf.shape)] for leaf in self.leaves],
            "n_examples": n_examples,
            "n_outputs": n_outputs,
            "dtype": dtype,
            **(requested or {}),
        }
        with hierarchy.creating(self.files, self.where, ARRAYS, overwrite, listener):
            if self.files.size(hierarchy.ROOT) is None:
                plan = plan_store(
                    n_examples=n_examples,
                    n_outputs=n_outputs,
                    n_columns=sum(leaf.size for leaf in self.leaves),
                    itemsize=np.dtype(storage_dtype(dtype)).itemsize,
                    memory=budget,
                    unit_size=unit_size,
                )
                self._refuse_small_disk(plan)
                self._create(plan, codec, outputs_dtype, wanted, left_out)
            self.store = JacobianStore(self.files, self.where)
            compare_requested(self.where, self.store.requested, wanted)
        if unit_size is not None and unit_size != self.store.unit_size and unit_size < n_examples:
            raise Mismatch(
                f"{self.where}: unit_size: {self.store.unit_size} -> {unit_size}; repeat the first --unit-size "
                "(unit_size=) or start anew with --overwrite (overwrite=True)"
            )
        self.units = _units_of_part(self.store.n_units, part)
        self._lock: Lock | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._done = set(self.store.ledger.done("unit"))

    def __enter__(self) -> StoreWriter:
        if isinstance(self.files, Folder) and self.units:
            self._lock = Lock(self.files, self.units.start, self.units.stop - 1, self.listener).__enter__()
        self._done = set(self.store.ledger.done("unit"))
        self._recheck()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        if self._lock is not None:
            self._lock.__exit__(*exception)

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Example ranges of this part's units that are not finished, in order."""
        return [self.store.unit_range(unit) for unit in self.units if unit not in self._done]

    def _recheck(self) -> None:
        """Make units unfinished again whose files are gone or torn, or which a reader found damaged."""
        suspects = set(self.store.ledger.done("suspect"))
        for unit in sorted(self._done.intersection(self.units)):
            bad = self.store.check_unit(unit) if unit in suspects else not self.store.sizes_match(unit)
            if bad:
                self.store.ledger.forget("unit", unit)
                self._done.discard(unit)
        for unit in suspects.intersection(self.units):
            self.store.ledger.forget("suspect", unit)

    def write_unit(
        self,
        start: int,
        rows: Mapping[str, np.ndarray],
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
            For each leaf path an array `(n, K, *shape)`, n examples; bfloat16 may come as uint16.
        outputs
            `(n, K)`; NaN if not given.
        norms
            Squared row norms `(n, K, L)` before rounding; computed from `rows` in float64 if not given.

        Raises
        ------
        Refused
            If the unit is not one of this writer's or is finished already, or an array has the wrong shape.
        NonFinite
            If a row holds NaN or infinity, naming the examples.
        """
        store = self.store
        unit, rest = divmod(start, store.unit_size)
        if rest or unit not in self.units:
            raise Refused(f"start {start}: no unit of this writer begins there; `missing` lists those to write")
        if unit in self._done:
            raise Refused(f"examples {start} to {store.unit_range(unit)[1] - 1} are stored already; `missing` lists the rest")
        count = store.unit_range(unit)[1] - start
        arrays = self._check_arrays(rows, count)
        norms = _norms(arrays) if norms is None else np.asarray(norms, np.float64)
        nonfinite = self._nonfinite(start, arrays, norms)
        if outputs is None:
            outputs = np.full((count, store.n_outputs), np.nan)
        self._sweep(unit)
        small = {"outputs": np.asarray(outputs).reshape(count, store.n_outputs), "norms": norms}
        if small["norms"].shape != (count, store.n_outputs, len(self.leaves)):
            raise Refused(f"norms {small['norms'].shape}: allowed is {(count, store.n_outputs, len(self.leaves))}")
        files = self._write_files(unit, arrays, small)
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
                "nonfinite_examples": nonfinite,
                "files": {name: record.to_list() for name, record in files.items()},
                **(facts or {}),
            },
        )
        self._done.add(unit)
        self.listener(UnitDone(unit=unit, examples=count, bytes_stored=size))

    def _check_arrays(self, rows: Mapping[str, np.ndarray], count: int) -> list[np.ndarray]:
        unknown = sorted(set(rows) - {leaf.path for leaf in self.leaves})
        if unknown:
            raise Refused(f"leaf {unknown[0]!r}: not a leaf of this store; leaves are {[f.path for f in self.leaves][:5]}")
        arrays = []
        for leaf in self.leaves:
            if leaf.path not in rows:
                raise Refused(f"leaf {leaf.path!r}: no rows given; every leaf needs an array (n, K, *shape)")
            array = np.asarray(rows[leaf.path])
            wanted = (count, self.store.n_outputs, *leaf.shape)
            if array.shape != wanted:
                raise Refused(f"leaf {leaf.path!r}: rows of shape {array.shape}, allowed is {wanted}")
            arrays.append(array.reshape(count, self.store.n_outputs, leaf.size))
        return arrays

    def _nonfinite(self, start: int, arrays: list[np.ndarray], norms: np.ndarray) -> list[int]:
        """Examples with NaN or infinity in what will be stored."""
        # A finite float32 norm proves finite rows; float16 can overflow in rounding, so its values are looked at.
        suspects = np.flatnonzero(~np.isfinite(norms).all(axis=(1, 2)))
        if self.dtype == "float16":
            suspects = np.arange(len(norms))
        bad = []
        for n in suspects:
            stored = [self._as_stored(array[n]) for array in arrays]
            values = [from_bfloat16(s) if self.dtype == "bfloat16" else s for s in stored]
            if not all(np.isfinite(v).all() for v in values):
                bad.append(int(start + n))
            elif not np.isfinite(norms[n]).all():
                # Finite rows whose squares left float32: their norms are taken again in float64.
                norms[n] = np.stack([np.square(v, dtype=np.float64).sum(-1) for v in values], -1)
        if bad and not self.allow_nonfinite:
            shown = ", ".join(map(str, bad[:10])) + (" and others" if len(bad) > 10 else "")
            raise NonFinite(
                f"rows of example(s) {shown} hold NaN or infinity as {self.dtype}; mend or leave out those inputs, "
                "choose a wider --dtype (dtype=), or store them with --allow-nonfinite (allow_nonfinite=True)"
            )
        return bad

    def _as_stored(self, values: np.ndarray) -> np.ndarray:
        if self.dtype == "bfloat16":
            return values if values.dtype == np.uint16 else to_bfloat16(values.astype(np.float32))
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(self.dtype, copy=False)

    def _sweep(self, unit: int) -> None:
        """Remove what a dead attempt left of this unit."""
        for name in self.files.names(FOLDER):
            if name.startswith(f".unit-{unit:07d}.json.") and name.endswith(".tmp"):
                self.files.remove(f"{FOLDER}/{name}")

    def _write_files(
        self, unit: int, arrays: list[np.ndarray], small: dict[str, np.ndarray]
    ) -> dict[str, FileRecord]:
        """Encode and write all files of a unit, several at a time: flushing waits for the disk, encoding for a core."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(IO_THREADS, "jacstore-write")
        layouts = self.store._layouts
        files = {
            layouts["rows"].file_name((unit, 0, at)): _row_pieces(layouts["rows"], (unit, 0, at), self, arrays)
            for at in range(layouts["rows"].files_along(2))
        }
        for name, values in small.items():
            at = (unit,) + (0,) * (values.ndim - 1)
            files[layouts[name].file_name(at)] = iter([_padded(layouts[name], values)])
        futures = {
            name: self._pool.submit(_write_file, self.files, name, layouts[name.split("/", 1)[0]], pieces)
            for name, pieces in files.items()
        }
        return {name: future.result() for name, future in futures.items()}

    def _create(
        self,
        plan: StorePlan,
        codec: str,
        outputs_dtype: str,
        wanted: Mapping[str, Any],
        left_out: Sequence[tuple[str, str]],
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
        small = {"per_file": (1, 1), "codec": "none", "dtype": outputs_dtype}
        layouts = [
            rows,
            ArrayLayout(
                name="outputs", shape=(n, k), piece=(unit, k), dimensions=("example", "output"), **small
            ),
            ArrayLayout(
                name="norms",
                shape=(n, k, len(self.leaves)),
                piece=(unit, k, len(self.leaves)),
                dimensions=("example", "output", "leaf"),
                **small | {"per_file": (1, 1, 1), "dtype": "float64"},
            ),
        ]
        attributes = {
            "kind": "store",
            "N": n,
            "K": k,
            "P": plan.n_columns,
            "leaves": [leaf.to_dict() for leaf in self.leaves],
            "left_out": [list(entry) for entry in left_out],
            "fingerprint": dict(wanted),
            "resolved": {
                "dtype": self.dtype,
                "codec": codec,
                "unit_size": unit,
                "arrays": [layout.to_dict() for layout in layouts],
            },
            "versions": hierarchy.versions(),
        }
        hierarchy.create(self.files, layouts, attributes)

    def _refuse_small_disk(self, plan: StorePlan) -> None:
        if not isinstance(self.files, Folder):
            return
        free = machine.free_disk(self.files.root)
        # Compression seldom halves float rows, and less can be promised of none.
        if plan.bytes_rows > free:
            raise Refused(
                f"{self.where}: rows take {format_size(plan.bytes_rows)}, its disk has {format_size(free)} free; "
                "choose another disk (--out, out=), --dtype bfloat16 (dtype=) or fewer examples (--examples A:B)"
            )


def _row_pieces(
    layout: ArrayLayout, at: tuple[int, ...], writer: StoreWriter, arrays: list[np.ndarray]
) -> Iterator[np.ndarray | None]:
    """Pieces of a rows file, gathered from the leaves side by side; padding at the array's border is NaN."""
    offsets = [leaf.offset for leaf in writer.leaves]
    piece = np.empty(layout.piece, layout.dtype)
    for where in layout.pieces_of(at):
        first, last = where[2].start, where[2].stop
        if first >= last:
            yield None
            continue
        count = where[0].stop - where[0].start
        if (count, last - first) != (layout.piece[0], layout.piece[2]):
            piece[...] = layout.fill
        for index in range(bisect.bisect_right(offsets, first) - 1, len(arrays)):
            offset, size = offsets[index], arrays[index].shape[2]
            if offset >= last:
                break
            a, b = max(first, offset), min(last, offset + size)
            values = arrays[index][:, :, a - offset : b - offset]
            piece[:count, :, a - first : b - first] = writer._as_stored(values)
        yield piece


def _padded(layout: ArrayLayout, values: np.ndarray) -> np.ndarray:
    piece = np.full(layout.piece, layout.fill, layout.dtype)
    piece[: len(values)] = values
    return piece


def _write_file(
    files: Files, name: str, layout: ArrayLayout, pieces: Iterable[np.ndarray | None]
) -> FileRecord:
    encoder = FileEncoder(layout)

    def buffers() -> Iterator[bytes | memoryview]:
        for piece in pieces:
            yield from encoder.encode(piece)
        yield from encoder.close()

    files.write(name, buffers())
    return encoder.record()


def _norms(arrays: list[np.ndarray]) -> np.ndarray:
    """Squared row norms `(n, K, L)` in float64, a row at a time to keep the copy small."""
    norms = np.empty((*arrays[0].shape[:2], len(arrays)))
    for index, array in enumerate(arrays):
        for n, k in np.ndindex(*array.shape[:2]):
            row = from_bfloat16(array[n, k]) if array.dtype == np.uint16 else array[n, k]
            norms[n, k, index] = np.square(row, dtype=np.float64).sum()
    return norms


def _as_leaves(given: Sequence[Any] | Mapping[str, tuple[int, ...]]) -> tuple[Leaf, ...]:
    entries = list(given.items()) if isinstance(given, Mapping) else list(given)
    if entries and all(isinstance(entry, Leaf) for entry in entries):
        return tuple(entries)
    leaves = dense_leaves([(str(path), tuple(int(n) for n in shape), "float32") for path, shape in entries])
    if len({leaf.path for leaf in leaves}) < len(leaves):
        raise Refused("leaves: two have the same path; each needs its own")
    return leaves


def _units_of_part(n_units: int, part: tuple[int, int]) -> range:
    """Units of part I of N, counted from 1."""
    number, parts = part
    return range((number - 1) * n_units // parts, number * n_units // parts)

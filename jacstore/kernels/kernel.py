"""A kernel on disk or in RAM: its tiles, each checked when it is read, and the lazy Dask array that they make."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np

from jacstore.base.schema import Open, Reported, short_hash, typed
from jacstore.errors import DamagedDataError, IncompleteError, InvalidRequestError
from jacstore.kernels.metadata import KernelAttributes, check_kernel
from jacstore.kernels.plan.arrays import WHOLE, layouts
from jacstore.kernels.plan.reports import KernelInfo
from jacstore.storage import zarr_group
from jacstore.storage.buckets import joined, located
from jacstore.storage.chunks import ArrayLayout, FileEncoder, FileRecord, check_file, decode, page_aligned, raw
from jacstore.storage.files import Files
from jacstore.storage.indexing import resolve
from jacstore.storage.kept_arrays import KeptFactorization, kept_factorizations
from jacstore.storage.ledger import FORMAT_VERSION, Ledger, readable

TRANSPOSED = 256


def _copy(values: np.ndarray, out: np.ndarray) -> None:
    """Copy and convert; transposed values in squares that stay in the cache."""
    if values.flags.c_contiguous or values.ndim < 2:
        out[...] = values
        return
    for a in range(0, values.shape[-2], TRANSPOSED):
        for b in range(0, values.shape[-1], TRANSPOSED):
            out[..., a : a + TRANSPOSED, b : b + TRANSPOSED] = values[..., a : a + TRANSPOSED, b : b + TRANSPOSED]


@dataclass(frozen=True, kw_only=True)
class TilesRecord(Open):
    """What the record of some tiles says: how many they are, mirrors not counted, and their files."""

    tiles: int
    files: dict[str, Any]
    diagonal_error: float | None = None


class Kernel:
    """A kernel opened for reading.

    Attributes
    ----------
    mode
        full `(N*K, M*K)`, trace `(N, M)` (the sum over outputs), diagonal `(K, N, M)` or blocks `(N, K, K)`.
    report
        Counts and seconds of the gram that returned this kernel; empty if it was opened.
    """

    def __init__(self, files: Files, where: str) -> None:
        self.files = files
        self._scratch = threading.local()
        self.path = where
        # What the gram that returned this kernel says of itself.
        self.assembled: Reported | None = None
        attributes = zarr_group.read_attributes(files, where)
        if attributes["kind"] != "kernel":
            raise InvalidRequestError(f"{where} is a {attributes['kind']}, not a kernel; give the path of a kernel")
        try:
            found = typed(KernelAttributes, attributes)
            check_kernel(found)
        except DamagedDataError as error:
            raise DamagedDataError(f"{where}: its attributes are damaged: {error}") from error
        # As it was written, to be compared with a later request, and as reading it needs it.
        self.requested: dict[str, Any] = attributes["fingerprint"]
        self.request, self.choices = found.fingerprint, found.resolved
        self._numerics: dict[str, Any] = attributes["resolved"].get("numerics", {})
        self.versions, self.stores = found.versions, list(found.stores)
        self.plan, self.leaves = self.choices.plan, list(self.choices.leaves)
        self.mode, self.triangle = self.plan.mode.value, self.request.triangle
        self.dtype = np.dtype(self.request.dtype)
        self.layouts = layouts(self.plan, self.leaves, self.dtype.name)
        totals = {"tiles": self.n_records, "suspect": self.n_records, "item": self.plan.n_items}
        owner = short_hash([self.requested, attributes["resolved"]])
        self.ledger = Ledger(files, owner, totals, sealed=found.sealed)
        self._tiles: dict[str, list[Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        if self.files.address is None:
            raise InvalidRequestError(
                "a kernel in RAM cannot go to other processes; assemble it on disk (--out, out=) or use "
                "--scheduler threads (scheduler=)"
            )
        return (open_kernel, (self.files.address,))

    def __repr__(self) -> str:
        state = "complete" if self.complete else "incomplete"
        return f"<Kernel {self.path}: {self.mode} {self.shape}, {self.dtype}, {state}>"

    @property
    def report(self) -> dict[str, Any]:
        """The keys of `jacstore gram --json`; empty if this kernel was opened."""
        return {} if self.assembled is None else self.assembled.to_dict()

    @property
    def engine(self) -> str:
        """What multiplied: blas or xla."""
        return self.choices.engine

    @property
    def precision(self) -> str:
        """Type of the products."""
        return self.choices.precision

    @property
    def numerics(self) -> dict[str, Any]:
        """What decided the digits: types of storage, products and sums, the device, expected errors."""
        return self._numerics

    @property
    def rounded_to(self) -> str | None:
        """The lower type that rows were rounded to before they were multiplied."""
        return self.choices.numerics.rounded_to

    @property
    def exact_diagonal(self) -> bool:
        """Whether the diagonal holds exact norms, not those of the stored rows: then it is not J Jᵀ of the stored J."""
        return self.request.exact_diagonal

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layouts[0].shape

    @property
    def n_records(self) -> int:
        """Records of a finished kernel: one for each group of tiles and array."""
        return len(self.plan.groups) * len(self.layouts)

    @property
    def complete(self) -> bool:
        """Whether every tile has a record."""
        return len(self.ledger.done("tiles")) == self.n_records

    def record(self, number: int) -> TilesRecord:
        """The record of the tiles of a group in one array.

        Raises
        ------
        DamagedDataError
            If it is missing, or cannot be about these tiles.
        """
        try:
            found = typed(TilesRecord, self.ledger.read("tiles", number))
            expected = self.files_of(number).values()
            if found.tiles != len(expected) or set(found.files) != {name for names in expected for name in names}:
                raise DamagedDataError("it lists other tiles than those of its group")
            for name, facts in found.files.items():
                self.layouts[number % len(self.layouts)].check_record(facts, 0, name)
        except DamagedDataError as error:
            raise DamagedDataError(f"{self.path}: the record of group {number} of tiles is damaged: {error}") from error
        return found

    @property
    def array(self) -> da.Array:
        """The whole kernel as a lazy Dask array, whatever is stored: triangle or full, one array or one per leaf.

        Raises
        ------
        IncompleteError
            If tiles are missing.
        """
        if not self.leaves:
            return self._lazy(0)
        return da.stack([self._lazy(index) for index in range(len(self.leaves))]).sum(0)

    @property
    def leaf_arrays(self) -> dict[str, da.Array]:
        """Kernel of each leaf by its path, where they were kept apart; they add up to `array`."""
        return {path: self._lazy(index) for index, path in enumerate(self.leaves)}

    def as_ntk(self) -> da.Array:
        """Mode full as `(N, M, K, K)`: entry [i, j, k, l] between output k of example i and output l of example j."""
        if not self.plan.mode.holds_every_product:
            raise InvalidRequestError(
                f"as_ntk needs mode full, this kernel has {self.mode}; assemble with --mode full (mode=)"
            )
        n, m, k = self.plan.rows.n_examples, self.plan.cols.n_examples, self.plan.n_outputs
        return self.array.reshape(n, k, m, k).transpose(0, 2, 1, 3)

    def to_xarray(self) -> Any:
        """The whole kernel as a lazy `xarray.DataArray` that knows the example and the output of every row and column.

        Returns
        -------
        xarray.DataArray
            Dimensions by mode: full `(row, column)` with the coordinates `example`, `output`, `other_example` and
            `other_output` along them; trace `(example, other_example)`; diagonal `(output, example, other_example)`;
            blocks `(example, output, other_output)`. Attributes say the mode, the path and the stores.

        Raises
        ------
        ModuleNotFoundError
            If xarray is not installed.
        IncompleteError
            If tiles are missing.
        """
        try:
            import xarray
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"Kernel.to_xarray needs xarray ({error}): pip install 'jacstore[xarray]'"
            ) from error
        plan, attributes = self.plan, {"mode": self.mode, "path": self.path, "stores": self.store_paths}
        coordinates = plan.mode.coordinates(plan.rows.n_examples, plan.cols.n_examples, plan.n_outputs)
        return xarray.DataArray(
            self.array, coordinates, plan.mode.dimensions, name=WHOLE, attrs={"long_name": "J Jᵀ", **attributes}
        )

    @property
    def store_paths(self) -> list[str]:
        """Where the stores should be, seen from here; a kernel knows them by their place beside it."""
        return [joined(self.path, one) for one in self.stores]

    def require_complete(self) -> None:
        """Refuse to go on with a kernel that is not finished."""
        missing = self.n_records - len(self.ledger.done("tiles"))
        if missing:
            raise IncompleteError(
                f"{self.path} is incomplete: {missing} group(s) of tiles missing; complete it by running the same "
                f"gram again: jacstore gram {' '.join(self.store_paths)} --out {self.path}"
            )

    def info(self) -> dict[str, Any]:
        """Sizes, choices and state, as `jacstore info --json` prints them; tiles of a damaged record are not done."""
        return self.summary().to_dict()

    def summary(self) -> KernelInfo:
        """The same as a value."""
        plan = self.plan
        records, damaged = readable(self.record, self.ledger.done("tiles"))
        return KernelInfo(
            kernel=self.path,
            stores=self.store_paths,
            mode=self.mode,
            rows=self.shape[-2],
            columns=self.shape[-1],
            shape=list(self.shape),
            examples=[plan.rows.n_examples, plan.cols.n_examples],
            outputs=plan.n_outputs,
            leaves=self.leaves,
            tiles_total=plan.tiles_total * len(self.layouts),
            tiles_done=sum(record.tiles for record in records),
            groups_damaged=damaged,
            items_total=plan.n_items,
            bytes_stored=sum(facts[0] for record in records for facts in record.files.values()),
            kept=self.kept(),
            engine=self.engine,
            precision=self.precision,
            exact_diagonal=self.exact_diagonal,
            numerics={**self.numerics, "measured_error": self._measured_error(records)},
            schedule=plan.schedule,
            complete=len(records) == self.n_records,
            format_version=FORMAT_VERSION,
            fingerprint=self.requested,
            dtype=self.dtype.name,
            codecs=["none"],
            versions=self.versions,
        )

    @staticmethod
    def _measured_error(records: list[TilesRecord]) -> float | None:
        """The largest relative difference of the diagonal from norms taken before rounding; None if none was seen."""
        seen = [record.diagonal_error for record in records if record.diagonal_error is not None]
        return max(seen, default=None)

    def _lazy(self, index: int) -> da.Array:
        self.require_complete()
        view = _LazyKernel(self, index)
        name = f"jacstore-{self.layouts[index].name}-{self.identity()}"
        return da.from_array(view, chunks=self.layouts[index].piece, name=name, asarray=False)

    def identity(self) -> str:
        """Hash of the request, which names the stores by their bytes."""
        return short_hash(self.requested)

    def content(self) -> str:
        """Hash of the request and of the recorded bytes of all tiles."""
        records, _ = readable(self.record, self.ledger.done("tiles"))
        return short_hash([self.identity(), sorted(item for record in records for item in record.files.items())])

    def kept(self) -> list[KeptFactorization]:
        """Factorizations that solvers keep in the kernel's folder; `jacstore.clean` removes them."""
        return kept_factorizations(self.files, self.ledger, self.content)

    def write_tile(self, index: int, i: int, j: int, tile: np.ndarray) -> dict[str, list[Any]]:
        """Write tile (i, j) of an array and, in a full symmetric kernel, its mirror; returns their records."""
        layout = self.layouts[index]
        written = [((i, j), tile)]
        if self._mirrored(i, j):
            written.append(((j, i), np.swapaxes(tile, -1, -2)))
        records = {}
        for at, values in written:
            piece = self._piece(layout)
            if values.shape != layout.piece:
                piece[...] = layout.fill
            _copy(values, piece[tuple(slice(0, n) for n in values.shape)])
            encoder = FileEncoder(layout)
            name = layout.file_name(self.plan.mode.chunk(*at))
            self.files.write(name, encoder.encode(piece) + encoder.close(), cached=False)
            records[name] = encoder.record().to_list()
        return records

    def _piece(self, layout: ArrayLayout) -> np.ndarray:
        """Memory of this thread for one piece: fresh pages for every tile cost as much as writing it."""
        held: np.ndarray | None = getattr(self._scratch, "piece", None)
        if held is None or held.shape != layout.piece or held.dtype != layout.dtype:
            held = self._scratch.piece = page_aligned(layout.piece, layout.dtype)
        return held

    def read_tile(self, index: int, i: int, j: int) -> np.ndarray:
        """Tile (i, j) without padding, checked against its record.

        Raises
        ------
        DamagedDataError
            If its bytes are not those that were recorded.
        """
        layout = self.layouts[index]
        if self.plan.symmetric and self.triangle and i > j:
            return np.swapaxes(self.read_tile(index, j, i), -1, -2)
        try:
            piece = self._load(layout, self.plan.mode.chunk(i, j))
        except DamagedDataError as error:
            self.mark(index, i, j)
            raise DamagedDataError(
                f"{self.path}: {self.named(index, i, j)}: {error}; run the same gram again to recompute this tile"
            ) from error
        return piece[tuple(slice(0, n) for n in self.plan.tile_shape(i, j))]

    def named(self, index: int, i: int, j: int) -> str:
        """A tile, and its leaf where leaves are kept apart, in words."""
        leaf = f" of leaf {self.leaves[index]}" if self.leaves else ""
        return f"tile ({i}, {j}){leaf}"

    def _load(self, layout: ArrayLayout, at: tuple[int, ...], whole: bool = False) -> np.ndarray:
        """One piece, checked against its record: the numbers, or `whole`, every byte of the file."""
        name = layout.file_name(at)
        record = FileRecord.from_list(self.facts(name))
        if not whole:
            piece = np.empty(layout.piece, layout.dtype)
            body = raw(piece)
            self.files.read_into(name, [(0, body)])
            decode(body, record.pieces[0], piece, layout, name)
            return piece
        size = self.files.size(name)
        if size is None:
            raise DamagedDataError(f"{name} is missing")
        if size > record.size:
            # It may be larger than memory.
            raise DamagedDataError(f"{name} has {size} bytes, recorded were {record.size}")
        data = np.empty(size, np.uint8)
        self.files.read_into(name, [(0, raw(data))])
        check_file(raw(data), record, layout, name)
        return data[: layout.piece_bytes].view(layout.dtype).reshape(layout.piece)

    def facts(self, name: str) -> list[Any]:
        """What is recorded of a tile's file."""
        fault = DamagedDataError(f"{name} has no record")
        if name not in self._tiles:
            for number in self.ledger.done("tiles"):
                try:
                    self._tiles |= self.record(number).files
                except DamagedDataError as error:
                    fault = error
        if name not in self._tiles:
            raise fault
        return self._tiles[name]

    def number_of(self, index: int, i: int, j: int) -> int:
        """Number of the record that a tile belongs to."""
        for number, group in enumerate(self.plan.groups):
            if group.rows[0] <= i < group.rows[1] and group.cols[0] <= j < group.cols[1]:
                return number * len(self.layouts) + index
        raise KeyError((i, j))

    def files_of(self, number: int) -> dict[tuple[int, int], list[str]]:
        """Files of every tile of a record: the tile's own and its mirror's, where that is stored."""
        group, index = divmod(number, len(self.layouts))
        name, chunk = self.layouts[index].file_name, self.plan.mode.chunk
        return {
            (i, j): [name(chunk(i, j)), *([name(chunk(j, i))] if self._mirrored(i, j) else [])]
            for i, j in self.plan.tiles_of(self.plan.groups[group])
        }

    def _mirrored(self, i: int, j: int) -> bool:
        """Whether a tile has a mirror on disk."""
        return self.plan.symmetric and i != j and not self.triangle

    def checked_tile(self, index: int, i: int, j: int) -> tuple[np.ndarray, np.ndarray | None]:
        """A tile and its stored mirror, transposed back, every byte of their files checked.

        Raises
        ------
        DamagedDataError
            Naming the file.
        """
        layout, shape = self.layouts[index], tuple(slice(0, n) for n in self.plan.tile_shape(i, j))
        tile = self._load(layout, self.plan.mode.chunk(i, j), whole=True)[shape]
        if not self._mirrored(i, j):
            return tile, None
        return tile, np.swapaxes(self._load(layout, self.plan.mode.chunk(j, i), whole=True), -1, -2)[shape]

    def mark(self, index: int, i: int, j: int, wrong: bool = False) -> None:
        """Leave a note that makes the next gram check this tile's bytes; never worth failing for.

        With `wrong` it recomputes the tile although its bytes are those recorded, as long as its record is the same.
        """
        if self.plan.symmetric and i > j:
            i, j = j, i
        with contextlib.suppress(OSError, InvalidRequestError, DamagedDataError):
            number = self.number_of(index, i, j)
            notes = self._notes(number)
            notes[f"{i},{j}"] = self.facts(self.layouts[index].file_name(self.plan.mode.chunk(i, j))) if wrong else None
            self.ledger.record("suspect", number, {"tiles": notes})

    def _notes(self, number: int) -> dict[str, Any]:
        try:
            notes = self.ledger.read("suspect", number)["tiles"]
        except (DamagedDataError, KeyError):
            return {}
        return notes if isinstance(notes, dict) else {}

    def to_recompute(self, number: int) -> list[tuple[int, int]]:
        """Tiles of a record that are gone or torn, and those that somebody left a note about and that are wrong.

        Raises
        ------
        DamagedDataError
            If the record itself is.
        """
        files = self.record(number).files
        self._tiles |= files
        index, notes = number % len(self.layouts), self._notes(number)
        found = []
        for (i, j), names in self.files_of(number).items():
            try:
                for name in names:
                    if self.files.size(name) != FileRecord.from_list(files[name]).size:
                        raise DamagedDataError(f"{name} is gone or torn")
                if f"{i},{j}" in notes:
                    self.checked_tile(index, i, j)
                    if notes[f"{i},{j}"] == files[names[0]]:
                        raise DamagedDataError(f"{names[0]} is wrong as it is recorded")
            except DamagedDataError:
                found.append((i, j))
        return found


class _LazyKernel:
    """A kernel as an array-like for Dask: a stored tile is read where its block is asked for."""

    def __init__(self, kernel: Kernel, index: int) -> None:
        self.kernel, self.index = kernel, index
        self.shape = kernel.shape
        self.ndim = len(self.shape)
        self.dtype = kernel.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        found, within = resolve(index, self.shape)
        lows, highs = [a for a, _ in found], [b for _, b in found]
        out = np.empty([b - a for a, b in zip(lows, highs, strict=True)], self.dtype)
        piece = self.kernel.layouts[self.index].piece
        spans = [range(a // p, -(-b // p)) for a, b, p in zip(lows, highs, piece, strict=True)]
        axes = self.kernel.plan.mode.example_axes
        for at in np.ndindex(*[len(span) for span in spans]):
            grid = [span[n] for span, n in zip(spans, at, strict=True)]
            tile = self.kernel.read_tile(self.index, grid[axes[0]], grid[axes[1]])
            source, target = [], []
            for axis, g in enumerate(grid):
                first = g * piece[axis]
                a, b = max(lows[axis], first), min(highs[axis], first + tile.shape[axis])
                source.append(slice(a - first, b - first))
                target.append(slice(a - lows[axis], b - lows[axis]))
            out[tuple(target)] = tile[tuple(source)]
        picked: np.ndarray = out[within]
        return picked


def open_kernel(path: str) -> Kernel:
    """Open a kernel on disk or in a bucket."""
    return Kernel(located(path), str(path))

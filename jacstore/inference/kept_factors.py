"""Keep the factorization of a kernel on disk in its folder, and use it again while the kernel's bytes stay the same.

The arrays are plain Zarr below `factors`, in squares, each checked against a record that names the kernel by its
request and by the checksums of its tiles. One Cholesky factor is kept (of the last alpha) and one eigendecomposition.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jacstore.base.events import silent
from jacstore.base.limits import LIMITS
from jacstore.base.machine import format_size
from jacstore.errors import DamagedDataError, InvalidRequestError, LockedError
from jacstore.kernels.kernel import Kernel, open_kernel
from jacstore.storage import zarr_group
from jacstore.storage.chunks import ArrayLayout, FileEncoder, FileRecord, decode, raw
from jacstore.storage.files import Files
from jacstore.storage.kept_arrays import (
    ARRAYS,
    FACTORS,
    LOCKS,
    NUMBER,
    FactorRecord,
    KeptFactorization,
    drop_factorizations,
    read_record,
    record_kind,
)
from jacstore.storage.ledger import Lock, sweep


class KeptFactor:
    """The factorization by one method that is, or will be, kept with a kernel.

    Attributes
    ----------
    record
        The record of a factorization of this kernel and alpha; None if there is none that can be used.
    """

    def __init__(self, kernel: Kernel, files: Files, method: str, alpha: float | None) -> None:
        self.kernel, self.files, self.method, self.alpha = kernel, files, method, alpha
        self.rows = kernel.shape[0]
        self.content, self._kind = kernel.content(), record_kind(method)
        found = read_record(kernel.ledger, method)
        matches = found is not None and (found.of, found.alpha) == (self.content, alpha)
        self.record: FactorRecord | None = found if matches else None

    def layouts(self) -> list[ArrayLayout]:
        """The arrays: U of a Cholesky factor, upper squares only, or values and vectors."""
        return [self._layout(name, 1 if name == "eigenvalues" else 2) for name in ARRAYS[self.method]]

    def _layout(self, name: str, axes: int) -> ArrayLayout:
        return ArrayLayout(
            name=f"{FACTORS}/{name}",
            shape=(self.rows,) * axes,
            piece=(min(LIMITS.kept_square, self.rows),) * axes,
            per_file=(1,) * axes,
            dtype="float64",
            codec="none",
            dimensions=("row", "column")[:axes],
        )

    def _squares(self, layout: ArrayLayout) -> Iterator[tuple[int, ...]]:
        grid = [layout.files_along(axis) for axis in range(len(layout.shape))]
        for at in np.ndindex(*grid):
            if self.method == "eigh" or at[0] <= at[1]:
                yield at

    def require_room(self) -> None:
        """Refuse before the work if saving would fail after it, for want of disk space or permission."""
        needed = sum(layout.piece_bytes * len(list(self._squares(layout))) for layout in self.layouts())
        free = self.files.free
        if needed > free:
            why = f"its disk has {format_size(free)} free" if free else "its folder cannot be written"
            raise InvalidRequestError(
                f"{self.kernel.path}: the factorization that is kept beside it takes {format_size(needed)}, {why}; "
                "give --no-keep (keep=False), which computes it each time"
            )

    def load(self) -> list[np.ndarray] | None:
        """The arrays of the record; None if their files differ from it."""
        try:
            return [self._read(layout) for layout in self.layouts()]
        except DamagedDataError:
            # No error: a factorization can be computed again.
            self.record = None
            return None

    def load_values(self) -> np.ndarray | None:
        """Eigenvalues alone, ascending."""
        with contextlib.suppress(DamagedDataError):
            return self._read(self.layouts()[0])
        return None

    def _read(self, layout: ArrayLayout) -> np.ndarray:
        files = {} if self.record is None else self.record.files
        whole, piece = np.empty(layout.shape), np.empty(layout.piece)
        for at in self._squares(layout):
            name = layout.file_name(at)
            if name not in files:
                raise DamagedDataError(f"{name} has no record")
            layout.check_record(files[name], 0, name)
            body = raw(piece)
            self.files.read_into(name, [(0, body)])
            decode(body, FileRecord.from_list(files[name]).pieces[0], piece, layout, name)
            (region,) = layout.pieces_of(at)
            whole[region] = piece[tuple(slice(0, s.stop - s.start) for s in region)]
        return whole

    def save(self, arrays: Sequence[np.ndarray], norm: float) -> None:
        """Write the arrays and then their record; leave it if another process is writing the same."""
        lock = LOCKS[self.method]
        with contextlib.suppress(LockedError), Lock(self.files, lock, lock, silent):
            sweep(self.files, [self._kind], [NUMBER])
            self.kernel.ledger.forget(self._kind, NUMBER)
            zarr_group.add(self.files, FACTORS, self.layouts())
            files: dict[str, Any] = {}
            for layout, array in zip(self.layouts(), arrays, strict=True):
                self._write(layout, array, files)
            self.files.sync_folders(files)
            record = {"of": self.content, "alpha": self.alpha, "norm": norm, "files": files}
            self.kernel.ledger.record(self._kind, NUMBER, record)

    def _write(self, layout: ArrayLayout, array: np.ndarray, files: dict[str, Any]) -> None:
        for at in self._squares(layout):
            (region,) = layout.pieces_of(at)
            piece = np.full(layout.piece, layout.fill)
            part = array[region]
            if self.method == "cholesky" and at[0] == at[1]:
                part = np.triu(part)
            piece[tuple(slice(0, n) for n in part.shape)] = part
            encoder, name = FileEncoder(layout), layout.file_name(at)
            self.files.write(name, encoder.encode(piece) + encoder.close())
            files[name] = encoder.record().to_list()


def kept_for(kernel: Kernel | None, method: str, alpha: float | None = None) -> KeptFactor | None:
    """The factorization that is or can be kept with a kernel; None if the kernel is in RAM."""
    if kernel is None or kernel.files.address is None:
        return None
    return KeptFactor(kernel, kernel.files, method, alpha)


def clean(kernel: Kernel | str | Path) -> list[KeptFactorization]:
    """Remove the factorizations that solvers and samplers keep in the folder of a kernel, and return them.

    `KernelFactor`, `KernelRidge`, `sample` and `jacstore predict` keep a factorization there, up to five times the
    bytes of a float32 kernel, and use it again. All of it can be computed again; the kernel itself stays as it is.

    Parameters
    ----------
    kernel
        A kernel on disk or its path; one in RAM keeps nothing.

    Raises
    ------
    InvalidRequestError
        If the path is not a kernel, or the folder cannot be written.
    LockedError
        If another process is writing a factorization.
    """
    opened = open_kernel(str(kernel)) if isinstance(kernel, str | Path) else kernel
    found = opened.kept()
    if found:
        drop_factorizations(opened.files, opened.ledger)
    return found

"""Files of posterior samples, and the finished passes that are kept until the samples are complete.

Beside `FILE.npy` stands a folder `FILE.npy.work` with the request, the results of finished passes, and the record that
makes the file count.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from jacstore.base.events import Listener
from jacstore.base.schema import typed
from jacstore.errors import DamagedDataError, InvalidRequestError, JacstoreError, RunInterruptedError
from jacstore.storage.chunks import raw
from jacstore.storage.files import Buffer, Folder
from jacstore.storage.ledger import Checksum, Ledger, Lock, compare_requested

WORK = ".work"
DONE, REQUEST, CHOICE = "done", "request", "choice"
ARRAYS = ("projected", "weights")


class SampleFile:
    """The state of one call; without a file nothing is kept."""

    def __init__(self, path: Path | None, stop: Callable[[], bool] | None) -> None:
        self.path, self._stop = path, stop
        if path is not None:
            self.work = Folder(f"{path}{WORK}")
            self.place = Folder(path.parent)
            self.ledger = Ledger(self.work)

    def asked(self) -> bool:
        """Whether to stop."""
        return self._stop is not None and self._stop()

    def stop(self) -> None:
        """Raise if asked to stop."""
        if self.asked():
            where = " and continues after the last finished pass" if self.path is not None else ""
            raise RunInterruptedError(f"interrupted; run the same call again{where}")

    def choice(self, name: str, value: str, allowed: Sequence[str]) -> str:
        """A choice: the one that an earlier attempt recorded, or `made` now."""
        if self.path is None:
            return value
        if not self.ledger.done(CHOICE):
            self.ledger.record(CHOICE, 0, {name: value})
        found = self.ledger.read(CHOICE, 0).get(name)
        if found not in allowed:
            raise DamagedDataError(
                f"{self.path}: the choice of {name} is damaged; draw again with --overwrite (overwrite=True)"
            )
        return str(found)

    def folder(self, name: str) -> Path | None:
        """A subfolder for results that have records of their own."""
        return None if self.path is None else self.work.root / name

    def array(self, name: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
        """The result of a finished pass, or of `compute` now."""
        self.stop()
        if self.path is None:
            return compute()
        if self.ledger.done(name):
            with contextlib.suppress(DamagedDataError):
                return self._checked(self.work, f"{name}.npy", name)
        found = compute()
        self.ledger.record(name, 0, {"crc32c": _write(self.work, f"{name}.npy", found)})
        return found

    def finished(self) -> np.ndarray | None:
        """The samples, if they are finished and undamaged.

        Raises
        ------
        DamagedDataError
            If the file differs from what was written.
        """
        if self.path is None or not self.ledger.done(DONE):
            return None
        try:
            return self._checked(self.place, self.path.name, DONE)
        except DamagedDataError as error:
            raise DamagedDataError(f"{self.path}: {error}; draw again with --overwrite (overwrite=True)") from None

    def _checked(self, folder: Folder, name: str, kind: str) -> np.ndarray:
        """An array that was written, if it matches its record."""
        return _checked(folder, name, typed(Checksum, self.ledger.read(kind, 0)).crc32c)

    def finish(self, samples: np.ndarray) -> np.ndarray:
        """Write the samples `(n, P)` and mark them as finished."""
        self.stop()
        if self.path is not None:
            partial = f".{self.path.name}.partial"
            checksum = _write(self.place, partial, samples)
            os.replace(self.place.root / partial, self.path)
            self.place.sync_folders([self.path.name])
            self.ledger.record(DONE, 0, {"crc32c": checksum})
            self.clear((*ARRAYS, CHOICE))
        return samples

    def clear(self, kinds: Iterable[str]) -> None:
        """Forget records of these kinds, in this order, and remove their files."""
        shutil.rmtree(self.work.root / "ggn", ignore_errors=True)
        for kind in kinds:
            self.ledger.forget(kind, 0)
            self.work.remove(f"{kind}.npy")


@contextlib.contextmanager
def kept_in(
    out: str | Path | None,
    requested: dict[str, Any],
    overwrite: bool,
    listener: Listener,
    stop: Callable[[], bool] | None,
) -> Iterator[SampleFile]:
    """The state of a call, locked, begun with the same request; one that keeps nothing if `out` is None.

    Raises
    ------
    InvalidRequestError
        If `out` does not end in `.npy`, or is a file that jacstore did not write.
    """
    if out is None:
        yield SampleFile(None, stop)
        return
    path = Path(out)
    if path.suffix != ".npy" or path.is_dir():
        raise InvalidRequestError(f"--out {out}: allowed is the name of a file that ends in .npy (out=)")
    state = SampleFile(path, stop)
    with Lock(state.work, 0, 0, listener):
        if overwrite:
            # The request goes last: what another one left must not be taken for this one's.
            state.clear((DONE, *ARRAYS, CHOICE, REQUEST))
        if not state.ledger.done(REQUEST):
            if path.exists() and not overwrite:
                raise InvalidRequestError(
                    f"--out {out} exists and was not written by this; give another name or --overwrite"
                )
            state.ledger.record(REQUEST, 0, requested)
        compare_requested(str(path), state.ledger.read(REQUEST, 0), requested)
        yield state


def _write(folder: Folder, name: str, values: np.ndarray) -> int:
    """Write an array, row after row, flushed; return the checksum of its numbers."""
    header = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(values.dtype), "fortran_order": False, "shape": values.shape}
    np.lib.format.write_array_header_1_0(header, described)
    checksum = 0

    def buffers() -> Iterator[Buffer]:
        nonlocal checksum
        yield header.getvalue()
        for row in values:
            view = raw(np.ascontiguousarray(row))
            checksum = crc32c(view, checksum)
            yield view

    folder.write(name, buffers())
    folder.sync_folders([name])
    return checksum


def _checked(folder: Folder, name: str, checksum: int) -> np.ndarray:
    """An array that was written, checked."""
    try:
        with folder.open(name) as file:
            found: np.ndarray = np.load(file, allow_pickle=False)
    except JacstoreError:
        raise
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise DamagedDataError(f"{name} cannot be read ({type(error).__name__})") from None
    if crc32c(raw(np.ascontiguousarray(found))) != checksum:
        raise DamagedDataError(f"{name} differs from what was recorded")
    return found

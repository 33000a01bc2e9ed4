"""Arrays that no example changes, such as the mask of a weight: stored once, checked by a digest in the attributes."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np

from jacstore.errors import DamagedDataError, InvalidRequestError
from jacstore.storage.chunks import CHECKSUM_BYTES, ArrayLayout, FileEncoder
from jacstore.storage.files import Files
from jacstore.terms.kinds import Constant, Leaf
from jacstore.terms.term import digest_of

GROUP = "constants"


def constant_layout(constant: Constant) -> ArrayLayout:
    """Its array: one piece, not compressed."""
    return ArrayLayout(
        name=f"{GROUP}/{constant.name}",
        shape=constant.shape,
        piece=constant.shape,
        per_file=(1,) * len(constant.shape),
        dtype=constant.dtype,
        codec="none",
        dimensions=tuple(f"{constant.name}_axis{axis}" for axis in range(len(constant.shape))),
    )


def constants_of(leaves: Iterable[Leaf]) -> list[Constant]:
    """Constants of all leaves, each once."""
    return list(dict.fromkeys(constant for leaf in leaves for constant in leaf.constants))


class StoredConstant:
    """Reads a constant when it is first needed."""

    def __init__(self, files: Files, where: str, constant: Constant) -> None:
        self._files, self._where, self._constant = files, where, constant
        self._lock = threading.Lock()
        self._held: np.ndarray | None = None

    def __call__(self) -> np.ndarray:
        with self._lock:
            if self._held is None:
                self._held = self._read()
            return self._held

    def _read(self) -> np.ndarray:
        found = intact(self._files, self._constant)
        if found is None:
            raise DamagedDataError(
                f"{self._where}: the array {GROUP}/{self._constant.name} is missing or damaged; run the same build "
                "again to write it anew"
            )
        return found


def intact(files: Files, constant: Constant) -> np.ndarray | None:
    """What is stored of a constant; None if it is not there or not what its digest says."""
    layout = constant_layout(constant)
    name = layout.file_name((0,) * len(layout.shape))
    if files.size(name) != layout.piece_bytes + CHECKSUM_BYTES:
        return None
    values = np.frombuffer(files.read(name)[:-CHECKSUM_BYTES], layout.dtype).reshape(layout.shape)
    return values if digest_of(values) == constant.digest else None


def keep_constants(files: Files, where: str, stored: Iterable[Leaf], given: Iterable[Leaf]) -> None:
    """Write the constants of a store that are not there yet, or that were damaged.

    Raises
    ------
    DamagedDataError
        If one is damaged and was computed otherwise this time.
    """
    known = {constant.digest: constant for constant in constants_of(given)}
    written = []
    for constant in constants_of(stored):
        if intact(files, constant) is not None:
            continue
        if constant.digest not in known:
            raise DamagedDataError(
                f"{where}: the array {GROUP}/{constant.name} is missing or damaged, and this machine computes another; "
                "start over with --overwrite (overwrite=True)"
            )
        values = known[constant.digest].values()
        if values is None:
            raise InvalidRequestError(f"constant {constant.name!r} has no values (leaves=)")
        layout = constant_layout(constant)
        encoder = FileEncoder(layout)
        name = layout.file_name((0,) * len(layout.shape))
        files.write(name, [*encoder.encode(np.ascontiguousarray(values)), *encoder.close()])
        written.append(name)
    files.sync_folders(written)


def constant_bytes(leaves: Iterable[Leaf]) -> int:
    """Bytes of the constants of some leaves."""
    return sum(constant_layout(constant).piece_bytes for constant in constants_of(leaves))

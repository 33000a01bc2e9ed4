"""List and remove the factorizations that solvers keep in the folder of a kernel.

They only save time: all of them can be computed again from the kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jacstore.base.events import silent
from jacstore.base.schema import Open, typed
from jacstore.errors import DamagedDataError
from jacstore.storage.files import Files
from jacstore.storage.ledger import Ledger, Lock, sweep

FACTORS = "factors"
# The arrays of each method, below FACTORS.
ARRAYS = {"cholesky": ("cholesky",), "eigh": ("eigenvalues", "eigenvectors")}
NUMBER = 0  # of the one record of each kind
# Range of the locks, apart from those of items and groups, so that starting a kernel anew waits for nobody's factor.
LOCKS = {"cholesky": 2_000_000, "eigh": 2_000_001}


@dataclass(frozen=True, kw_only=True)
class FactorRecord(Open):
    """The record of a factorization: its kernel's hash, the number added to the diagonal, the norm, and the files."""

    of: str
    alpha: float | None
    norm: float
    files: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class KeptFactorization:
    """A factorization that is kept in the folder of a kernel.

    Attributes
    ----------
    method
        cholesky, for one alpha, or eigh, for any.
    alpha
        The number added to the diagonal; None for eigh, and if the record is missing or damaged.
    bytes
        Bytes of its files.
    usable
        Whether it was computed from the present bytes of the kernel; if not, it is computed again when it is needed.
    """

    method: str
    alpha: float | None
    bytes: int
    usable: bool


def record_kind(method: str) -> str:
    """Kind of the record of a method's factorization."""
    return f"factor-{method}"


def read_record(ledger: Ledger, method: str) -> FactorRecord | None:
    """The record of a factorization; None if it is missing or damaged."""
    with contextlib.suppress(DamagedDataError):
        return typed(FactorRecord, ledger.read(record_kind(method), NUMBER))
    return None


def kept_factorizations(files: Files, ledger: Ledger, content: Callable[[], str]) -> list[KeptFactorization]:
    """The factorizations kept in a kernel's folder; `content` returns the hash of the kernel's present bytes."""
    if files.address is None:
        return []
    found = []
    for method, arrays in ARRAYS.items():
        record = read_record(ledger, method)
        size = sum(files.tree_bytes(f"{FACTORS}/{array}") for array in arrays)
        if record is not None or size:
            usable = record is not None and record.of == content()
            alpha = None if record is None else record.alpha
            found.append(KeptFactorization(method=method, alpha=alpha, bytes=size, usable=usable))
    return found


def drop_factorizations(files: Files, ledger: Ledger) -> None:
    """Remove the factorizations that are kept.

    Raises
    ------
    LockedError
        If another process is writing a factorization.
    InvalidRequestError
        If the folder cannot be written.
    """
    for method, lock in LOCKS.items():
        with Lock(files, lock, lock, silent):
            sweep(files, [record_kind(method)], [NUMBER])
            # The record goes first: files without a record are never taken for a factorization.
            ledger.forget(record_kind(method), NUMBER)
            for array in ARRAYS[method]:
                files.remove_tree(f"{FACTORS}/{array}")
    if not any(files.tree_bytes(f"{FACTORS}/{array}") for arrays in ARRAYS.values() for array in arrays):
        files.remove_tree(FACTORS)

"""Stores and kernels below a folder, and what two of them were asked for differently."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jacstore.base.schema import Reported
from jacstore.errors import InvalidRequestError, JacstoreError
from jacstore.kernels.gram import open_path
from jacstore.kernels.kernel import Kernel
from jacstore.storage.files import refuse_address
from jacstore.storage.zarr_group import ROOT
from jacstore.store.reader import JacobianStore

# What is no longer searched: nobody looks for a store so far below the folder that he names.
DEEPEST = 4


@dataclass(frozen=True, kw_only=True)
class Listed(Reported):
    """One store or kernel: `shape` (N, K, P) or that of the kernel, `state` in words, empty `kind` if unreadable."""

    path: str
    kind: str
    shape: list[int]
    detail: str
    bytes_stored: int
    complete: bool
    state: str


@dataclass(frozen=True, kw_only=True)
class Listing(Reported):
    """Stores and kernels in a folder, or the one that it is, by path."""

    folder: str
    found: list[Listed]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A field of two requests, nested ones joined by dots; None stands for one that it has not."""

    field: str
    first: Any
    second: Any


@dataclass(frozen=True, kw_only=True)
class Comparison(Reported):
    """What two stores, or two kernels, were asked for differently."""

    first: str
    second: str
    kind: str
    same: bool
    differences: list[Difference]


def list_folder(folder: str | Path) -> Listing:
    """Stores and kernels in a folder, or the one that it is, by path.

    Raises
    ------
    InvalidRequestError
        If there is no such folder.
    """
    refuse_address(str(folder))
    root = Path(folder)
    if not root.is_dir():
        raise InvalidRequestError(f"{folder}: no such folder; give one that holds stores and kernels")
    return Listing(
        folder=str(folder), found=[found for path in _groups(root, 0) if (found := _listed(path)) is not None]
    )


def _groups(folder: Path, depth: int) -> Iterator[Path]:
    """Folders of Zarr groups, which are not entered."""
    if (folder / ROOT).is_file():
        yield folder
        return
    if depth >= DEEPEST:
        return
    try:
        inner = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for path in inner:
        yield from _groups(Path(path), depth + 1)


def _listed(path: Path) -> Listed | None:
    """What one is; None if this Zarr group is not of jacstore."""
    where = str(path)
    try:
        found = open_path(path)
        return _of_store(found, where) if isinstance(found, JacobianStore) else _of_kernel(found, where)
    except InvalidRequestError as error:
        if "is not a jacstore store or kernel" in str(error):
            return None
        return _unreadable(where, error)
    except (JacstoreError, OSError) as error:
        return _unreadable(where, error)


def _unreadable(where: str, error: Exception) -> Listed:
    text = str(error).removeprefix(f"{where}: ")
    return Listed(path=where, kind="", shape=[], detail="", bytes_stored=0, complete=False, state=text)


def _of_store(store: JacobianStore, where: str) -> Listed:
    info = store.summary()
    return Listed(
        path=where,
        kind="store",
        shape=[info.examples, info.outputs, info.parameters],
        detail=info.dtype,
        bytes_stored=info.bytes_stored,
        complete=info.complete,
        state=_state(info.units_done, info.units_total, len(info.units_damaged), "units"),
    )


def _of_kernel(kernel: Kernel, where: str) -> Listed:
    info = kernel.summary()
    return Listed(
        path=where,
        kind="kernel",
        shape=info.shape,
        detail=f"{info.mode} {info.dtype}",
        bytes_stored=info.bytes_stored,
        complete=info.complete,
        state=_state(info.tiles_done, info.tiles_total, len(info.groups_damaged), "tiles"),
    )


def _state(done: int, total: int, damaged: int, what: str) -> str:
    if damaged:
        return f"{damaged} damaged record(s), {done:,} of {total:,} {what}"
    return "complete" if done >= total else f"{done:,} of {total:,} {what}"


# ------------------------------------------------------------------------------------------------------- differences


def compare(first: str | Path, second: str | Path) -> Comparison:
    """What two stores, or two kernels, were asked for differently.

    Raises
    ------
    InvalidRequestError
        If one is a store and the other a kernel.
    """
    one, other = open_path(first), open_path(second)
    kinds = ["store" if isinstance(found, JacobianStore) else "kernel" for found in (one, other)]
    if kinds[0] != kinds[1]:
        raise InvalidRequestError(
            f"{first} is a {kinds[0]} and {second} a {kinds[1]}; give two stores or two kernels to compare"
        )
    before, now = _flat(one.requested), _flat(other.requested)
    differences = [
        Difference(field=field, first=before.get(field), second=now.get(field))
        for field in dict.fromkeys([*before, *now])
        if before.get(field) != now.get(field)
    ]
    return Comparison(
        first=str(first), second=str(second), kind=kinds[0], same=not differences, differences=differences
    )


def _flat(request: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Fields of fields by their path."""
    found: dict[str, Any] = {}
    for key, value in request.items():
        name = f"{above}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return found

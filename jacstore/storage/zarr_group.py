"""Create and open Zarr v3 groups on disk; the root metadata is written last and makes a group exist."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import zarr
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.storage import MemoryStore

from jacstore.base.events import Listener
from jacstore.base.schema import short_hash
from jacstore.errors import DamagedDataError, InvalidRequestError, JacstoreError
from jacstore.storage.buckets import located
from jacstore.storage.chunks import BLOSC_LEVELS, ArrayLayout
from jacstore.storage.files import Files, Folder, Memory, explain, sync_path
from jacstore.storage.ledger import FOLDER, FORMAT_VERSION, Lock, read_json

ROOT = "zarr.json"
KINDS = ("store", "kernel")


def versions() -> dict[str, str]:
    """Versions of the packages that decide the numbers and the bytes."""
    found = {"python": platform.python_version()}
    for package in ("jacstore", "numpy", "jax", "zarr", "numcodecs", "dask", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def create(
    files: Files, layouts: Sequence[ArrayLayout], attributes: dict[str, Any], groups: Sequence[str] = ()
) -> None:
    """Make the arrays, then the root group with its attributes. In RAM only the attributes are kept."""
    attributes = {"format_version": FORMAT_VERSION, "sealed": True, **attributes}
    attributes["checksum"] = {"of": sorted(attributes), "blake2b": short_hash(attributes)}
    if files.address is None:
        files.publish(ROOT, json.dumps({"attributes": attributes}).encode())
    elif isinstance(files, Folder):
        # The ledger is a group too: readers would warn of a folder that is none.
        try:
            for group in (FOLDER, *groups):
                if files.size(f"{group}/{ROOT}") is None:
                    zarr.create_group(files.about_to_create(f"{group}/{ROOT}").parent, zarr_format=3)
            for layout in layouts:
                _create_array(files.about_to_create(f"{layout.name}/{ROOT}").parent, layout)
            _flush_metadata(files.root)
            # Zarr writes the root's metadata by rename, so a reader sees all of it or none.
            zarr.create_group(files.about_to_create(ROOT).parent, zarr_format=3, attributes=attributes)
            _flush_metadata(files.root)
        except JacstoreError:
            raise
        except OSError as error:
            raise explain(error, files.root, 0) from error
    else:
        _put_metadata(files, layouts, [FOLDER, *groups])
        # Whoever creates at the same time finds this one, and compares its request with it.
        files.create(ROOT, _metadata(lambda store: zarr.create_group(store, zarr_format=3, attributes=attributes)))


def add(files: Files, group: str, layouts: Sequence[ArrayLayout]) -> None:
    """Make arrays anew below a group of a finished store or kernel; their names begin with the group's."""
    if not isinstance(files, Folder):
        _put_metadata(files, layouts, [group])
        return
    try:
        if files.size(f"{group}/{ROOT}") is None:
            zarr.create_group(files.about_to_create(f"{group}/{ROOT}").parent, zarr_format=3)
        for layout in layouts:
            _create_array(files.about_to_create(f"{layout.name}/{ROOT}").parent, layout)
        _flush_metadata(files.root / group)
    except JacstoreError:
        raise
    except OSError as error:
        raise explain(error, files.root / group, 0) from error


def _put_metadata(files: Files, layouts: Sequence[ArrayLayout], groups: Sequence[str]) -> None:
    """The metadata of groups and arrays as Zarr writes it, one put each."""
    for group in groups:
        files.write(f"{group}/{ROOT}", [_metadata(lambda store: zarr.create_group(store, zarr_format=3))])
    for layout in layouts:
        files.write(f"{layout.name}/{ROOT}", [_metadata(functools.partial(_create_array, layout=layout))])


def _metadata(create: Callable[[Any], Any]) -> bytes:
    """What Zarr writes as the metadata of a group or an array."""
    written: dict[str, Any] = {}
    create(MemoryStore(written))
    data: bytes = written[ROOT].to_bytes()
    return data


def _create_array(store: Path | MemoryStore, layout: ArrayLayout) -> None:
    compressors: list[Any] = []
    if layout.codec != "none":
        # A string: the enumeration of names is callable in some versions of zarr and not in others.
        name: Any = layout.codec
        compressors.append(BloscCodec(cname=name, clevel=BLOSC_LEVELS[layout.codec], shuffle="bitshuffle"))
    file_shape = tuple(p * n for p, n in zip(layout.piece, layout.per_file, strict=True))
    zarr.create_array(
        store,
        shape=layout.shape,
        chunks=layout.piece,
        shards=file_shape if layout.sharded else None,
        dtype=layout.dtype,
        fill_value=layout.fill,
        compressors=[*compressors, Crc32cCodec()],
        filters=None,
        dimension_names=layout.dimensions,
        zarr_format=3,
        overwrite=True,
    )


def _flush_metadata(root: Path) -> None:
    for path in [*root.rglob(ROOT), root]:
        sync_path(path)
        sync_path(path.parent)


def read_attributes(files: Files, where: str) -> dict[str, Any]:
    """Attributes of a store or kernel.

    Raises
    ------
    InvalidRequestError
        If there is nothing, if it is not ours, or if a newer version wrote it.
    """
    if files.size(ROOT) is None:
        raise InvalidRequestError(f"{where}: no jacstore store or kernel here (no {ROOT}); check the path")
    attributes = read_json(files, ROOT).get("attributes")
    if not isinstance(attributes, dict) or attributes.get("kind") not in KINDS:
        raise InvalidRequestError(f"{where}: this Zarr group is not a jacstore store or kernel; check the path")
    found = attributes.get("format_version")
    if type(found) is not int or found > FORMAT_VERSION:
        raise InvalidRequestError(
            f"{where}: format version {found}, this jacstore reads up to {FORMAT_VERSION}; upgrade jacstore"
        )
    try:
        checked = attributes["checksum"]
        guarded: dict[str, Any] = {key: attributes[key] for key in checked["of"]}
        intact = short_hash(guarded) == checked["blake2b"]
    except (KeyError, TypeError):
        intact = False
    if not intact:
        raise DamagedDataError(f"{where}: the attributes in {ROOT} differ from their checksum")
    # Others may have added attributes of their own; no checksum guards those.
    return guarded


def place(out: str | Path | None, memory: int) -> Files:
    """Where a store or kernel lives: a folder, a place in a bucket, or RAM for None and `memory://`."""
    return Memory(memory) if out is None or str(out) == "memory://" else located(out)


@contextlib.contextmanager
def creating(files: Files, where: str, known: Sequence[str], overwrite: bool, listener: Listener) -> Iterator[None]:
    """Hold the right to create: one process at a time examines, clears or makes the root.

    Raises
    ------
    InvalidRequestError
        If the folder holds anything that jacstore did not make.
    """
    if files.address is None:
        yield
        return
    try:
        if overwrite:
            _clear(files, where, known, listener)
        for name in _refuse_foreign(files, where, known):
            files.remove(name)
    except JacstoreError:
        raise
    except OSError as error:
        raise InvalidRequestError(
            f"{where} cannot be written ({error.strerror}); give another folder (--out, out=)"
        ) from error
    with files.guard(f"{FOLDER}/.creating"):
        yield


def begun(out: str | Path | None, memory: int, known: Sequence[str]) -> Files | None:
    """The files that a run would continue, without writing to it; None if the run would begin a new one.

    Raises
    ------
    InvalidRequestError
        If the folder holds anything that jacstore did not make.
    """
    files = place(out, memory)
    if files.address is None:
        return None
    _refuse_foreign(files, str(out), known)
    return None if files.size(ROOT) is None else files


def _refuse_foreign(files: Files, where: str, known: Sequence[str]) -> set[str]:
    """Refuse a folder with foreign files; return the temporary files of Zarr that a kill during creation left."""
    names = files.entries(where)
    dead = {name for name in names if name.startswith("zarr.") and name.endswith(".partial")}
    foreign = sorted(names - dead - {*known, FOLDER, ROOT})
    if foreign:
        raise InvalidRequestError(
            f"{where} holds {foreign[0]!r}, not written by jacstore; give another folder (--out, out=)"
        )
    return dead


def _clear(files: Files, where: str, known: Sequence[str], listener: Listener) -> None:
    """Delete what `--overwrite` replaces, unless a live process works on it."""
    _refuse_foreign(files, where, known)
    if not files.entries(where):
        return
    if files.size(ROOT) is not None:
        read_attributes(files, where)
    with Lock(files, 0, 10**7 - 1, listener):
        files.clear(ROOT)

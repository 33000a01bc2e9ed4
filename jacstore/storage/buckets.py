"""The same files as objects in a bucket, through obstore; and what is a path where paths may be addresses.

An object is put as a whole or not at all, so there is nothing to flush and nothing to rename, and there are no folders.
What must not be overwritten is put on the condition that there is none, or that it has not changed since it was read.
Requests are slow and cost money: each is counted, and what lies side by side in an object is read by one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jacstore.base import machine
from jacstore.base.limits import LIMITS, UNLIMITED
from jacstore.errors import DamagedDataError, InvalidRequestError
from jacstore.storage import exclusive, files
from jacstore.storage.files import ADDRESS, RAM, Buffer, Files, Folder

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# The scheme of each provider, and the beginning of the environment variables that obstore reads for it.
SCHEMES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
EXTRA = "pip install 'jacstore[remote]'"
# Objects that are read or written at once: a request waits long before it transfers anything.
AT_ONCE = 32
PARTS_AT_ONCE = 4
# Objects that a request lists, or deletes.
PAGE = 1000
# A request that fails, or whose answer is lost, is sent again for so long.
RETRIES = 10
RETRY_SECONDS = 180
ANSWER_SECONDS = 120
# Bytes between pieces that lie side by side: a checksum.
GAP = 4
# What is said of a lock that nobody holds: deleting it could hit that of a new holder.
NOBODY = b"{}"

_counted: Counter[str] = Counter()
_counting = threading.Lock()


def requests() -> Counter[str]:
    """Requests of this process so far: get_range (of data), get (of records), put, head, list, delete."""
    with _counting:
        return Counter(_counted)


def _count(kind: str, number: int = 1) -> None:
    with _counting:
        _counted[kind] += number


# ----------------------------------------------------------------------------------------------- paths and addresses


def is_address(given: str | Path) -> bool:
    """Whether a path names a place in a bucket."""
    return scheme_of(given) in SCHEMES


def scheme_of(given: str | Path) -> str:
    """The scheme of an address, in small letters; empty for a path."""
    return str(given).partition(":")[0].lower() if ADDRESS.match(str(given)) else ""


def refuse_unknown(given: str | Path) -> None:
    """Refuse `scheme://` that is not known; taken for a path it would become a folder of that name."""
    if str(given) != RAM and scheme_of(given) not in ("", *SCHEMES):
        allowed = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise InvalidRequestError(
            f"{given} is an address; allowed are paths, {RAM} for what is kept in RAM, and buckets ({allowed}) with "
            f"{EXTRA} (--out, out=)"
        )


def located(given: str | Path) -> Files:
    """The folder or the place in a bucket that a path names."""
    refuse_unknown(given)
    return Bucket(given) if is_address(given) else Folder(given)


def absolute(given: str) -> str:
    """The path as it is from any working directory; RAM and addresses are what they are."""
    return given if ADDRESS.match(given) else os.path.abspath(given)


def normal(given: str | Path) -> str:
    """The path without `..`; addresses are what they are."""
    return str(given) if ADDRESS.match(str(given)) else os.path.normpath(given)


def relative(path: str, start: str) -> str:
    """A path as seen from another one, so that both can be moved together; absolute where they share no root."""
    if RAM in (path, start):
        return path
    if not (is_address(path) or is_address(start)):
        return os.path.relpath(os.path.abspath(path), os.path.abspath(start))
    if not (is_address(path) and is_address(start)):
        return absolute(path)
    (bucket, inside), (other, below) = split(path), split(start)
    return posixpath.relpath("/" + inside, "/" + below) if bucket == other else path


def joined(start: str, path: str) -> str:
    """What `relative` made relative, seen from here."""
    if ADDRESS.match(path):
        return path
    if not is_address(start) or os.path.isabs(path):
        return os.path.normpath(os.path.join(start, path))
    bucket, below = split(start)
    return f"{bucket}/{posixpath.normpath(posixpath.join('/', below, path)).lstrip('/')}"


def free_bytes(given: str) -> int:
    """Bytes that may still be written at a path, in RAM or in a bucket."""
    return UNLIMITED if ADDRESS.match(given) else machine.free_disk(given)


def split(given: str | Path) -> tuple[str, str]:
    """The bucket, as `scheme://name`, and the path in it.

    Raises
    ------
    InvalidRequestError
        If either is missing, or the path is none.
    """
    # pathlib leaves one slash of two.
    found = re.fullmatch(r"([a-z0-9]+):/{1,2}([^/]+)/(.+?)/*", str(given), re.IGNORECASE)
    parts = found[3].split("/") if found else [""]
    if not found or any(part in ("", ".", "..") for part in parts) or any(ord(sign) < 32 for sign in str(given)):
        raise InvalidRequestError(
            f"{str(given)!r} names no place in a bucket; give scheme://BUCKET/PATH without empty parts, '.' or '..', "
            "such as s3://bucket/run.jac (--out, out=)"
        )
    return f"{found[1].lower()}://{found[2]}", found[3]


# ------------------------------------------------------------------------------------------------------- the bucket


@functools.cache
def connect(bucket: str) -> ObjectStore:
    """The bucket, with credentials from the environment variables that obstore reads.

    Raises
    ------
    InvalidRequestError
        If obstore is not installed, or what it finds in the environment is not enough.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise InvalidRequestError(f"{bucket}: reading and writing buckets needs obstore: {EXTRA}") from None
    # An endpoint that is given as http:// is meant so.
    plain = os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", "")).startswith("http://")
    options: Any = {"timeout": timedelta(seconds=ANSWER_SECONDS), **({"allow_http": True} if plain else {})}
    retry: Any = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)}
    try:
        return from_url(bucket, client_options=options, retry_config=retry)
    except (BaseError, ValueError) as error:
        raise _explain(bucket, error) from error


def _explain(address: str, error: Exception) -> InvalidRequestError:
    """The refusal for a bucket that cannot be used, with what obstore says of it in one line."""
    said = " ".join(str(error).partition("\n\nDebug source")[0].split())
    # What the server itself says, where it does so.
    if told := re.search(r"<Code>(\w+)</Code>\s*<Message>([^<]*)", said):
        said = f"{told[1]}: {told[2]}"
    prefix = SCHEMES[scheme_of(address)]
    return InvalidRequestError(
        f"{address} cannot be reached ({said[:300]}); check that the bucket exists, the network, and the environment "
        f"variables {prefix}_* with region, endpoint and credentials that may read and write it"
    )


class Bucket:
    """Objects below a path in a bucket: the files of a store or kernel.

    A put leaves an object complete; only a record that is published afterwards makes it count.
    """

    at_once = AT_ONCE
    copies = True

    def __init__(self, where: str | Path) -> None:
        bucket, self.prefix = split(where)
        self.address = f"{bucket}/{self.prefix}"
        self.objects = connect(bucket)
        self.bytes_read = 0
        self.bytes_held = 0
        self.fences: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """A bucket has no end."""
        return UNLIMITED

    @contextlib.contextmanager
    def _asking(self, kind: str, number: int = 1) -> Iterator[None]:
        """Count a request; what it raises beyond what the caller handles is explained in one line."""
        from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError

        _count(kind, number)
        try:
            yield
        except (AlreadyExistsError, PreconditionError) as error:
            raise FileExistsError(str(error)) from error
        except (NotFoundError, FileNotFoundError) as error:
            raise FileNotFoundError(str(error)) from error
        except (BaseError, OSError) as error:
            raise _explain(self.address, error) from error

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def _ask_fences(self) -> None:
        for fence in list(self.fences):
            fence()

    def _put(self, name: str, data: Any, **how: Any) -> None:
        import obstore

        try:
            with self._asking("put"):
                obstore.put(self.objects, self._key(name), data, **{"use_multipart": False, **how})
        except FileNotFoundError as error:
            raise _explain(self.address, error) from error

    def _put_if(self, name: str, data: bytes, mode: Any) -> bool:
        """Put an object on a condition; whether it held.

        Where an answer was lost the request is sent again, and finds what it put itself.
        """
        try:
            self._put(name, data, mode=mode)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                return self.read(name) == data
            return False
        return True

    def _get(self, name: str) -> tuple[bytes, dict[str, str]]:
        """An object, and what names this version of it.

        Raises
        ------
        FileNotFoundError
            If there is none.
        """
        import obstore

        try:
            with self._asking("get"):
                found = obstore.get(self.objects, self._key(name))
                data = bytes(found.bytes())
        except FileNotFoundError:
            raise FileNotFoundError(name) from None
        meta = found.meta
        version = {key: meta.get(key) for key in ("e_tag", "version")}
        return data, {key: str(value) for key, value in version.items() if value is not None}

    def create(self, name: str, data: bytes) -> bool:
        """Put an object unless there is one; whether there was none."""
        return self._put_if(name, data, "create")

    def replace(self, name: str, data: bytes, before: bytes) -> bool:
        """Replace an object that says `before`, and that nobody replaces meanwhile; whether it was so."""
        try:
            found, version = self._get(name)
        except FileNotFoundError:
            return False
        return found == before and self._put_if(name, data, version)

    @contextlib.contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """One process at a time is inside, whatever machine it runs on."""
        held, mine = f"{name}.held", exclusive.claim()
        since, seen = time.monotonic(), b""
        while True:
            try:
                found = self.read(held)
            except FileNotFoundError:
                if self.create(held, mine):
                    break
                continue
            if found != seen:
                since, seen = time.monotonic(), found
            if found == NOBODY or exclusive.is_dead(found, time.monotonic() - since):
                if self.replace(held, mine, found):
                    break
            else:
                time.sleep(LIMITS.bucket_pause_seconds)
        try:
            yield
        finally:
            with contextlib.suppress(InvalidRequestError):
                self.replace(held, NOBODY, mine)

    def write(self, name: str, buffers: Iterable[Buffer], cached: bool = True) -> int:
        """Put one object from buffers that may be produced meanwhile; return its size."""
        self._ask_fences()
        files.before_step("write", name)
        size = 0

        def counted() -> Iterator[bytes]:
            nonlocal size
            for buffer in buffers:
                size += memoryview(buffer).nbytes
                yield bytes(buffer)

        parts = _parts(counted())
        first, second = next(parts, b""), next(parts, None)
        # What was produced so far may be written by nobody if producing the rest took long.
        self._ask_fences()
        if second is None:
            self._put(name, first)
        else:
            more = {"use_multipart": True, "chunk_size": LIMITS.bucket_part_bytes, "max_concurrency": PARTS_AT_ONCE}
            self._put(name, chain([first, second], parts), **more)
            # Beginning, parts and end.
            _count("put", 1 + -(-size // LIMITS.bucket_part_bytes))
        return size

    def sync_folders(self, names: Iterable[str]) -> None:
        """Nothing to flush: an object that was put stays."""

    def publish(self, name: str, data: bytes) -> None:
        """Put a small object, where there is one only if nobody replaces it meanwhile.

        A run that was taken for dead and goes on cannot replace what its successor has put.
        """
        self._ask_fences()
        files.before_step("record", name)
        if self.create(name, data):
            return
        with contextlib.suppress(FileNotFoundError):
            _, version = self._get(name)
            self._ask_fences()
            if self._put_if(name, data, version):
                return
        raise InvalidRequestError(
            f"{self.address}/{name} was written by another process at the same time; wait for it, then run the same "
            "command again"
        )

    def read(self, name: str) -> bytes:
        """Return a whole small object.

        Raises
        ------
        FileNotFoundError
            If there is none.
        """
        return self._get(name)[0]

    def window(self, name: str, first: int, last: int) -> memoryview:
        """Bytes `first` to `last` of an object by one request.

        Raises
        ------
        DamagedDataError
            If the object is missing or too short.
        """
        import obstore

        if first == last:
            return memoryview(b"")
        try:
            with self._asking("get_range"):
                found = memoryview(obstore.get_range(self.objects, self._key(name), start=first, end=last))
        except FileNotFoundError:
            raise DamagedDataError(f"{name} is missing") from None
        except InvalidRequestError:
            # A range beyond the end is an error of the provider's own.
            size = self.size(name)
            if size is None or size >= last:
                raise
            raise DamagedDataError(f"{name} ends at byte {size}, before what was recorded") from None
        if len(found) != last - first:
            raise DamagedDataError(f"{name} ends at byte {first + len(found)}, before what was recorded")
        with self._lock:
            self.bytes_read += len(found)
        return found

    def read_into(self, name: str, spans: Iterable[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset of one object, neighbours by one request.

        Raises
        ------
        DamagedDataError
            If the object is missing or too short.
        """
        for first, last, buffers in _runs(sorted(spans, key=lambda span: span[0])):
            found = self.window(name, first, last)
            for offset, buffer in buffers:
                buffer[:] = found[offset - first : offset - first + len(buffer)]

    def size(self, name: str) -> int | None:
        """Bytes of an object; None if it is missing."""
        import obstore

        try:
            with self._asking("head"):
                return int(obstore.head(self.objects, self._key(name))["size"])
        except FileNotFoundError:
            return None

    def _list(self, folder: str) -> tuple[list[str], list[str]]:
        """Keys of the objects directly below a folder, and of the folders there."""
        import obstore

        below = self._key(folder) if folder else self.prefix
        with self._asking("list"):
            found = obstore.list_with_delimiter(self.objects, below)
        _count("list", (len(found["objects"]) + len(found["common_prefixes"])) // PAGE)
        # A key that ends here, as consoles make for an empty folder, is no file in it.
        keys = [str(one["path"]) for one in found["objects"] if str(one["path"]) != below]
        return keys, [str(one) for one in found["common_prefixes"]]

    def names(self, folder: str) -> list[str]:
        """Names of the objects directly below a folder, sorted."""
        try:
            return sorted(posixpath.basename(key) for key in self._list(folder)[0])
        except FileNotFoundError as error:
            raise _explain(self.address, error) from error

    def entries(self, where: str) -> set[str]:
        """Names of the objects and folders directly below the root."""
        try:
            keys, folders = self._list("")
        except FileNotFoundError as error:
            raise _explain(self.address, error) from error
        return {posixpath.basename(one.rstrip("/")) for one in [*keys, *folders]}

    def _below(self, folder: str) -> list[tuple[str, int]]:
        """Key and size of every object below a folder, however deep."""
        import obstore

        below = self._key(folder) if folder else self.prefix
        with self._asking("list"):
            pages = list(obstore.list(self.objects, below, chunk_size=PAGE))
        _count("list", max(0, len(pages) - 1))
        return [(str(one["path"]), int(one["size"])) for page in pages for one in page if str(one["path"]) != below]

    def _delete(self, keys: list[str]) -> None:
        import obstore

        if not keys:
            return
        with contextlib.suppress(FileNotFoundError), self._asking("delete", -(-len(keys) // PAGE)):
            obstore.delete(self.objects, keys[0] if len(keys) == 1 else keys)

    def clear(self, first: str) -> None:
        """Delete everything, `first` before the rest."""
        files.before_step("clear", first)
        self._delete([self._key(first)])
        for key, _ in self._below(""):
            files.before_step("clear", key)
        self._delete([key for key, _ in self._below("")])

    def remove(self, name: str) -> None:
        """Delete an object if it is there."""
        files.before_step("remove", name)
        self._delete([self._key(name)])

    def remove_folder(self, name: str) -> None:
        """There are no folders."""

    def tree_bytes(self, folder: str) -> int:
        """Bytes of all objects below a folder."""
        return sum(size for _, size in self._below(folder))

    def remove_tree(self, folder: str) -> None:
        """Delete all objects below a folder."""
        self._delete([key for key, _ in self._below(folder)])


def _parts(buffers: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in parts of `LIMITS.bucket_part_bytes` or a little more; the last may be smaller."""
    held: list[bytes] = []
    size = 0
    for buffer in buffers:
        held.append(buffer)
        size += len(buffer)
        if size >= LIMITS.bucket_part_bytes:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def _runs(spans: list[tuple[int, memoryview]]) -> Iterator[tuple[int, int, list[tuple[int, memoryview]]]]:
    """Spans that lie side by side, but for the checksums between pieces, as one: its bounds and what is in it."""
    run: list[tuple[int, memoryview]] = []
    for offset, buffer in spans:
        if run and offset - (run[-1][0] + len(run[-1][1])) > GAP:
            yield run[0][0], run[-1][0] + len(run[-1][1]), run
            run = []
        run.append((offset, buffer))
    if run:
        yield run[0][0], max(offset + len(buffer) for offset, buffer in run), run

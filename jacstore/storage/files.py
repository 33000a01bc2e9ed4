"""Durable files below one folder, or the same in memory; every byte read is counted here.

All reading and writing of stored data passes through this module, so that counts are true and faults can be injected:
tests replace `before_step`, which is called with the name of each protocol step and the file that it is about to touch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from jacstore.base import leaving, machine
from jacstore.base.limits import IO_THREADS
from jacstore.base.machine import format_size
from jacstore.errors import DamagedDataError, InvalidRequestError, JacstoreError
from jacstore.storage import exclusive

RAM = "memory://"
# One letter is a drive, not a scheme.
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(/|$)")
Buffer = bytes | bytearray | memoryview
PAGE = 4096
# Not everywhere can the page cache be passed by.
DIRECT = getattr(os, "O_DIRECT", 0)
# What a file system says that cannot do it, or not for this many bytes.
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
# What it says of what it cannot flush, such as folders on CIFS and sshfs. There a rename lasts when the server says so.
UNFLUSHED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
# What file systems without links say: FAT, some of FUSE and CIFS.
UNLINKED = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)
# Bytes that are gathered to write past it what does not begin at a page.
STAGED = 2**20


def _no_step(step: str, name: str) -> None:
    """Do nothing; the seam for fault injection."""


before_step: Callable[[str, str], None] = _no_step


class Files(Protocol):
    """What a store or kernel needs from the place that holds its bytes."""

    # Each is asked before a file is put in place; a lock that is held no more raises.
    fences: list[Callable[[], None]]
    # How many files are read or written at the same time.
    at_once: int
    # Whether a file is copied as a whole before it is written.
    copies: bool

    @property
    def bytes_read(self) -> int: ...
    @property
    def bytes_held(self) -> int: ...
    @property
    def address(self) -> str | None:
        """What opens the same place in another process; None for what only this one can see."""
        ...

    @property
    def free(self) -> int:
        """Bytes that may still be written there."""
        ...

    def guard(self, name: str) -> contextlib.AbstractContextManager[None]: ...
    def entries(self, where: str) -> set[str]: ...
    def clear(self, first: str) -> None: ...
    def create(self, name: str, data: bytes) -> bool: ...
    def replace(self, name: str, data: bytes, before: bytes) -> bool: ...
    def window(self, name: str, first: int, last: int) -> memoryview | None: ...
    def tree_bytes(self, folder: str) -> int: ...
    def remove_tree(self, folder: str) -> None: ...
    def remove_folder(self, name: str) -> None: ...
    def write(self, name: str, buffers: Iterable[Buffer], cached: bool = True) -> int: ...
    def sync_folders(self, names: Iterable[str]) -> None: ...
    def publish(self, name: str, data: bytes) -> None: ...
    def read(self, name: str) -> bytes: ...
    def read_into(self, name: str, spans: Iterable[tuple[int, memoryview]]) -> None: ...
    def size(self, name: str) -> int | None: ...
    def names(self, folder: str) -> list[str]: ...
    def remove(self, name: str) -> None: ...


def is_path(text: str) -> bool:
    """Whether this machine can name a file so."""
    try:
        return bool(text) and "\0" not in text and os.fsencode(text) != b""
    except UnicodeEncodeError:
        return False


def refuse_address(given: str | Path) -> None:
    """Refuse `scheme://` that is not known; taken for a path it would become a folder of that name.

    `pathlib` leaves one slash of two, and none at the end.
    """
    if str(given) != RAM and ADDRESS.match(str(given)):
        raise InvalidRequestError(
            f"{given} is an address; allowed are paths of this machine's files, and {RAM} for what is kept in RAM "
            "(--out, out=); stores, kernels and predictions may also be in a bucket, s3://, gs:// or az://"
        )


class Folder:
    """Files below a folder on disk.

    `write` leaves a file complete and flushed, but only a record that is published afterwards makes it count.
    """

    at_once = IO_THREADS
    copies = False

    def __init__(self, root: str | Path) -> None:
        if not is_path(str(root)):
            raise InvalidRequestError(f"{str(root)!r} is not a path; give the path of a folder (--out, out=)")
        refuse_address(root)
        self.root = Path(root)
        self.bytes_read = 0
        self.fences: list[Callable[[], None]] = []
        self._count = threading.Lock()

    @property
    def address(self) -> str:
        """The absolute path: another process may have another working directory."""
        return os.path.abspath(self.root)

    @property
    def free(self) -> int:
        """Bytes free on its disk; none where nothing may be written."""
        return machine.free_disk(self.root) if not self.root.exists() or os.access(self.root, os.W_OK) else 0

    @property
    def bytes_held(self) -> int:
        """Bytes in RAM: none."""
        return 0

    def inside(self, name: str) -> Path:
        """The path of a file that is about to be written or removed.

        Raises
        ------
        InvalidRequestError
            If a link on the way to it leads elsewhere.
        """
        path = self.root / name
        folder = os.path.join(os.path.realpath(self.root), *Path(name).parts[:-1])
        if os.path.realpath(folder) != folder:
            raise InvalidRequestError(
                f"{path.parent} is reached through a link, and nothing is written through links; put a folder in its "
                "place, or give another one (--out, out=)"
            )
        return path

    def _ask_fences(self) -> None:
        for fence in list(self.fences):
            fence()

    def about_to_create(self, name: str) -> Path:
        """As `inside`, for metadata that Zarr writes; it would wait for ever at a pipe."""
        before_step("create", name)
        path = self.inside(name)
        if path.exists() and not path.is_file():
            raise InvalidRequestError(f"{path} is not a file; move it away, or give another folder (--out, out=)")
        return path

    def entries(self, where: str) -> set[str]:
        """Names of the files and folders directly below the root.

        Raises
        ------
        InvalidRequestError
            If the root is a file.
        """
        if self.root.is_dir():
            return {entry.name for entry in os.scandir(self.root)}
        if self.root.exists():
            raise InvalidRequestError(f"{where} is a file; give a folder that is new or empty (--out, out=)")
        return set()

    def clear(self, first: str) -> None:
        """Delete everything below the root, `first` before the rest."""
        clear_folder(self.root, first)

    def create(self, name: str, data: bytes) -> bool:
        """Put a small file in place unless there is one; whether there was none. It is not flushed."""
        path = self.inside(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            temporary.write_bytes(data)
            # Unlike a rename, a link takes no other file's place.
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in UNLINKED:
                raise
            return _create_exclusively(path, data)
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def replace(self, name: str, data: bytes, before: bytes) -> bool:
        """Replace a small file that says `before`; whether it does. It is not flushed."""
        path = self.inside(name)
        try:
            if self.read(name) != before:
                return False
        except FileNotFoundError:
            return False
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        temporary.write_bytes(data)
        os.replace(temporary, path)
        return True

    @contextlib.contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """One process at a time is inside, whatever machine it runs on."""
        with contextlib.ExitStack() as stack:
            try:
                self.inside(name).parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(exclusive.held(self.inside(f"{name}.held")))
            except OSError as error:
                raise explain(error, self.root / name, 0) from error
            yield

    def write(self, name: str, buffers: Iterable[Buffer], cached: bool = True) -> int:
        """Write and flush one file from buffers that may be produced while it is written; return its size.

        Without `cached` whole pages go past the page cache where that is possible: copying into it takes longer, and it
        is left to what is still to be read. What is read soon is read ten times faster from it.
        """
        self._ask_fences()
        path = self.inside(name)
        size = 0

        def counted() -> Iterator[memoryview]:
            nonlocal size
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                size += len(view)
                yield view

        before_step("write", name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Without waiting, should a pipe stand there.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o666)
            try:
                if not cached:
                    _past_the_cache(descriptor, True)
                for view in counted() if cached else _in_pages(counted()):
                    if not cached and len(view) % PAGE:
                        _past_the_cache(descriptor, False)
                    _write_all(descriptor, view)
                before_step("fsync", name)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except JacstoreError:
            raise
        except OSError as error:
            raise explain(error, path, size) from error
        return size

    def sync_folders(self, names: Iterable[str]) -> None:
        """Flush the folders that hold the named files, and the folders above them up to the root."""
        folders: set[Path] = set()
        for name in names:
            folder = (self.root / name).parent
            while folder not in folders:
                folders.add(folder)
                if folder == self.root:
                    break
                folder = folder.parent
        for folder in folders:
            before_step("fsync folder", str(folder.relative_to(self.root)))
            try:
                sync_path(folder)
            except OSError as error:
                raise explain(error, folder, 0) from error

    def publish(self, name: str, data: bytes) -> None:
        """Put a small file in place in one step: temporary name, flush, rename, flush the folder."""
        self._ask_fences()
        path = self.inside(name)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        before_step("record", name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                before_step("fsync record", name)
                os.fsync(file.fileno())
            before_step("rename", name)
            self._ask_fences()
            os.replace(temporary, path)
            before_step("fsync renamed", name)
            sync_path(path.parent)
        except JacstoreError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise explain(error, path, len(data)) from error

    def read(self, name: str) -> bytes:
        """Return a whole small file.

        Raises
        ------
        FileNotFoundError
            If there is none.
        """
        with self.open(name) as file:
            return file.read()

    def open(self, name: str) -> BinaryIO:
        """A file to be read; errors are those of `read`."""
        return os.fdopen(self._open(name), "rb")

    def _open(self, name: str) -> int:
        """A descriptor of a regular file.

        Raises
        ------
        FileNotFoundError
            If there is none.
        DamagedDataError, InvalidRequestError
            If there is something else, or it cannot be read.
        """
        try:
            # Without waiting, should a pipe stand there.
            descriptor = os.open(self.root / name, os.O_RDONLY | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(name) from None
        except PermissionError as error:
            raise _unreadable(error, self.root / name) from error
        except OSError as error:
            raise DamagedDataError(f"{name} cannot be read ({error.strerror})") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise DamagedDataError(f"{name} is not a file")
        return descriptor

    def read_into(self, name: str, spans: Iterable[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset of one file, opened once.

        Raises
        ------
        DamagedDataError
            If the file is missing or too short.
        """
        try:
            descriptor = self._open(name)
        except FileNotFoundError:
            raise DamagedDataError(f"{name} is missing") from None
        total = 0
        try:
            for offset, buffer in spans:
                filled = 0
                while filled < len(buffer):
                    got = os.preadv(descriptor, [buffer[filled:]], offset + filled)
                    if got == 0:
                        raise DamagedDataError(f"{name} ends at byte {offset + filled}, before what was recorded")
                    filled += got
                total += filled
        except JacstoreError:
            raise
        except OSError as error:
            raise DamagedDataError(f"{name} cannot be read ({error.strerror})") from error
        finally:
            os.close(descriptor)
            with self._count:
                self.bytes_read += total

    def window(self, name: str, first: int, last: int) -> memoryview | None:
        """None: pieces are read one by one, each straight to where it is wanted."""
        return None

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if it is missing or something else."""
        try:
            found = (self.root / name).stat()
        except PermissionError as error:
            raise _unreadable(error, self.root / name) from error
        except OSError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def names(self, folder: str) -> list[str]:
        """Names of the files directly below a folder, sorted."""
        try:
            with os.scandir(self.root / folder) as entries:
                return sorted(entry.name for entry in entries if entry.is_file())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _unreadable(error, self.root / folder) from error

    def remove(self, name: str) -> None:
        """Delete a file if it is there."""
        before_step("remove", name)
        try:
            self.inside(name).unlink(missing_ok=True)
        except NotADirectoryError:
            pass
        except OSError as error:
            raise explain(error, self.root / name, 0) from error

    def remove_folder(self, name: str) -> None:
        """Delete a folder if it is there and empty."""
        with contextlib.suppress(OSError):
            (self.root / name).rmdir()

    def tree_bytes(self, folder: str) -> int:
        """Bytes of all files below a folder; one that another process removes meanwhile has none."""
        total = 0
        for path in (self.root / folder).rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size if path.is_file() else 0
        return total

    def remove_tree(self, folder: str) -> None:
        """Delete a folder with all that is in it, if it is there."""
        try:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.inside(folder))
        except OSError as error:
            raise InvalidRequestError(
                f"{self.root / folder} cannot be removed ({error.strerror}); check its permissions"
            ) from error


class Memory:
    """The same in RAM; what goes beyond `limit` bytes moves everything to a temporary folder.

    Nobody else can open it: it needs no locks, and what is kept beside it is lost with it.
    """

    at_once = IO_THREADS
    copies = True
    address = None

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.fences: list[Callable[[], None]] = []
        self.root: Path | None = None
        self._bytes_read = 0
        self._held: dict[str, bytes] = {}
        self._total = 0
        self._folder: Folder | None = None
        self._lock = threading.RLock()

    @property
    def bytes_read(self) -> int:
        return self._bytes_read + (self._folder.bytes_read if self._folder else 0)

    @property
    def free(self) -> int:
        """No limit: what does not fit goes to a temporary folder."""
        return 2**62

    @contextlib.contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Nobody else is there."""
        yield

    def entries(self, where: str) -> set[str]:
        with self._lock:
            return {name.split("/")[0] for name in self._held}

    def clear(self, first: str) -> None:
        for name in list(self._held):
            self.remove(name)

    def create(self, name: str, data: bytes) -> bool:
        with self._lock:
            if self.size(name) is not None:
                return False
            self.write(name, [data])
            return True

    def replace(self, name: str, data: bytes, before: bytes) -> bool:
        with self._lock:
            if self.size(name) is None or self.read(name) != before:
                return False
            self.write(name, [data])
            return True

    def window(self, name: str, first: int, last: int) -> memoryview | None:
        """None: nothing is gained."""
        return None

    def tree_bytes(self, folder: str) -> int:
        with self._lock:
            return sum(len(data) for name, data in self._held.items() if name.startswith(folder + "/"))

    def remove_tree(self, folder: str) -> None:
        for name in list(self._held):
            if name.startswith(folder + "/"):
                self.remove(name)

    def remove_folder(self, name: str) -> None:
        """There are no folders."""

    @property
    def in_memory(self) -> bool:
        """Whether everything is still in RAM."""
        return self._folder is None

    @property
    def bytes_held(self) -> int:
        """Bytes in RAM."""
        return self._total if self.in_memory else 0

    def write(self, name: str, buffers: Iterable[Buffer], cached: bool = True) -> int:
        before_step("write", name)
        # Copied one by one: a generator may use its memory again for the next.
        data = b"".join(bytes(buffer) for buffer in buffers)
        with self._lock:
            self._total += len(data) - len(self._held.get(name, b""))
            self._held[name] = data
            if self._folder is None and self._total > self.limit:
                self._folder = Folder(tempfile.mkdtemp(prefix="jacstore-"))
                removal = weakref.finalize(self, shutil.rmtree, self._folder.root, ignore_errors=True)
                leaving.holds(removal, removal)
            if self._folder is not None:
                for held_name in list(self._held):
                    self._folder.write(held_name, [self._held.pop(held_name)])
        return len(data)

    def sync_folders(self, names: Iterable[str]) -> None:
        """Nothing to flush: memory does not outlive the process."""

    def publish(self, name: str, data: bytes) -> None:
        before_step("record", name)
        self.write(name, [data])

    def read(self, name: str) -> bytes:
        with self._lock:
            if name in self._held:
                return self._held[name]
        if self._folder is None:
            raise FileNotFoundError(name)
        return self._folder.read(name)

    def read_into(self, name: str, spans: Iterable[tuple[int, memoryview]]) -> None:
        with self._lock:
            data = self._held.get(name)
        if data is None:
            if self._folder is None:
                raise DamagedDataError(f"{name} is missing")
            return self._folder.read_into(name, spans)
        total = 0
        for offset, buffer in spans:
            if offset + len(buffer) > len(data):
                raise DamagedDataError(f"{name} ends at byte {len(data)}, before what was recorded")
            buffer[:] = memoryview(data)[offset : offset + len(buffer)]
            total += len(buffer)
        with self._lock:
            self._bytes_read += total
        return None

    def size(self, name: str) -> int | None:
        with self._lock:
            if name in self._held:
                return len(self._held[name])
        return self._folder.size(name) if self._folder else None

    def names(self, folder: str) -> list[str]:
        prefix = folder + "/"
        with self._lock:
            held = [n[len(prefix) :] for n in self._held if n.startswith(prefix) and "/" not in n[len(prefix) :]]
        return sorted(held + (self._folder.names(folder) if self._folder else []))

    def remove(self, name: str) -> None:
        with self._lock:
            self._total -= len(self._held.pop(name, b""))
        if self._folder:
            self._folder.remove(name)


def _create_exclusively(path: Path, data: bytes) -> bool:
    """Create a file where there are no links; a reader may see it half written."""
    try:
        with open(path, "xb") as file:
            file.write(data)
    except FileExistsError:
        return False
    return True


def clear_folder(path: Path, first: str) -> None:
    """Empty a folder; the file `first`, which makes it count, goes before the rest."""
    before_step("clear", first)
    (path / first).unlink(missing_ok=True)
    with os.scandir(path) as entries:
        found = list(entries)
    for entry in found:
        before_step("clear", entry.name)
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _unreadable(error: OSError, path: Path) -> InvalidRequestError:
    return InvalidRequestError(f"{path} cannot be read ({error.strerror}); change its mode or owner")


def _in_pages(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes in whole pages that begin at a page, but for the end: views of the buffers, or of copies.

    Copies are valid until the next view is taken.
    """
    memory = np.empty(STAGED + PAGE, np.uint8)
    pages = memory[-memory.ctypes.data % PAGE :][:STAGED].data
    held = 0
    for buffer in buffers:
        view = buffer
        while len(view):
            count = len(view) // PAGE * PAGE
            if count and not held and np.frombuffer(view, np.uint8).ctypes.data % PAGE == 0:
                yield view[:count]
            else:
                count = min(len(view), STAGED - held)
                pages[held : held + count] = view[:count]
                held += count
                if held == STAGED:
                    yield pages
                    held = 0
            view = view[count:]
    whole = held // PAGE * PAGE
    yield pages[:whole]
    yield pages[whole:held]


def _past_the_cache(descriptor: int, past: bool) -> bool:
    """Write past the page cache from now on, where that is possible, or no longer; whether that changes anything."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    wanted = flags | DIRECT if past else flags & ~DIRECT
    if wanted == flags:
        return False
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, wanted)
    return True


def _write_all(descriptor: int, view: memoryview) -> None:
    """Write a buffer, by way of the page cache where the file system refuses to go past it."""
    while len(view):
        try:
            view = view[os.write(descriptor, view) :]
        except OSError as error:
            if error.errno not in REFUSALS or not _past_the_cache(descriptor, False):
                raise


def sync_path(path: Path) -> None:
    """Flush a file, or a folder where folders can be; an error, and no waiting, where something else stands."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNFLUSHED or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def explain(error: OSError, path: Path, size: int) -> InvalidRequestError:
    """The refusal for a file that could not be written, with what the user can do about it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return InvalidRequestError(
            f"disk full while writing {path} ({format_size(size)} of it written); finished work is kept: "
            "free some space and run the same command again"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return InvalidRequestError(
            f"{path} cannot be written ({error.strerror}); give a folder that you may write to (--out, out=)"
        )
    return InvalidRequestError(
        f"{path} cannot be written ({error.strerror or error}); move away what is in its way, or give another folder "
        "(--out, out=)"
    )

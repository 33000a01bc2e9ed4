"""Records of finished work, comparison of requests, and locks on ranges of work.

There is one small JSON file per finished piece of work. Only this record makes the work done; it is written last and in
one step.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jacstore.base import leaving, machine
from jacstore.base.events import Listener, Waiting
from jacstore.base.limits import LIMITS
from jacstore.base.schema import Open, parse, short_hash, typed
from jacstore.errors import (
    DamagedDataError,
    InvalidRequestError,
    JacstoreError,
    LockedError,
    RequestMismatchError,
    RunInterruptedError,
)
from jacstore.storage.buckets import is_address, located
from jacstore.storage.files import RAM, Files, explain

FORMAT_VERSION = 1
FOLDER = "ledger"

Record = TypeVar("Record")


class Ledger:
    """Records of a store or kernel.

    Parameters
    ----------
    owner
        Hash of what the records belong to; a record of another store, or of an attempt with other choices, is refused.
    totals
        Number of pieces of work of each listed kind; records beyond it are ignored.
    sealed
        Whether every record has a seal; records of earlier versions have none.
    """

    def __init__(
        self, files: Files, owner: str = "", totals: Mapping[str, int] | None = None, *, sealed: bool = False
    ) -> None:
        self.files, self.owner, self.totals, self.sealed = files, owner, totals or {}, sealed

    def done(self, kind: str) -> list[int]:
        """Numbers of the finished pieces of work of one kind, ascending."""
        form = re.compile(rf"{re.escape(kind)}-([0-9]{{7,}})\.json")
        matched = (form.fullmatch(name) for name in self.files.names(FOLDER))
        numbers = {int(match[1]) for match in matched if match and record_name(kind, int(match[1])).endswith(match[0])}
        return sorted(number for number in numbers if number < self.totals.get(kind, math.inf))

    def record(self, kind: str, number: int, facts: Mapping[str, Any]) -> None:
        """Mark a piece of work as finished."""
        sealed = {**facts, "seal": self.seal(kind, number, facts)}
        text = json.dumps(sealed, separators=(",", ":"), allow_nan=False)
        self.files.publish(record_name(kind, number), text.encode())

    def read(self, kind: str, number: int) -> dict[str, Any]:
        """The record of a finished piece of work.

        Raises
        ------
        DamagedDataError
            If the record is missing, not JSON, or of something else.
        """
        found = read_json(self.files, record_name(kind, number))
        there = self.sealed or "seal" in found
        if found.pop("seal", None) != self.seal(kind, number, found) and there:
            raise DamagedDataError(f"{record_name(kind, number)} is changed, or the record of something else")
        return found

    def seal(self, kind: str, number: int, facts: Mapping[str, Any]) -> str:
        """A hash of a record together with its owner, kind and number."""
        return short_hash([self.owner, kind, number, facts])

    def forget(self, kind: str, number: int) -> None:
        """Make a piece of work unfinished again."""
        self.files.remove(record_name(kind, number))


def readable(read: Callable[[int], Record], numbers: Iterable[int]) -> tuple[list[Record], list[int]]:
    """The records that can be read, and the numbers of damaged ones, which a report leaves out."""
    found, damaged = [], []
    for number in numbers:
        try:
            found.append(read(number))
        except DamagedDataError:
            damaged.append(number)
    return found, damaged


def sweep(files: Files, kinds: Iterable[str], numbers: Iterable[int]) -> None:
    """Remove temporary records that a dead attempt at these pieces of work left."""
    prefixes = {f".{kind}-{number:07d}.json." for kind in kinds for number in numbers}
    for name in files.names(FOLDER):
        stem, _, _ = name.removesuffix(".tmp").rpartition(".")
        if name.endswith(".tmp") and stem + "." in prefixes:
            files.remove(f"{FOLDER}/{name}")


def record_name(kind: str, number: int) -> str:
    """File of a record."""
    return f"{FOLDER}/{kind}-{number:07d}.json"


def read_json(files: Files, name: str) -> dict[str, Any]:
    """A JSON object from a file of ours."""
    try:
        return parse(files.read(name), name)
    except FileNotFoundError:
        raise DamagedDataError(f"{name} is missing") from None


def compare_requested(path: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to continue a job that was started from another request.

    Raises
    ------
    RequestMismatchError
        Naming every field that differs.
    """
    differences = []
    for field in dict.fromkeys([*found, *wanted]):
        before, now = found.get(field), wanted.get(field)
        if before != now:
            differences.append(f"{field}: {_brief(before)} -> {_brief(now)}")
    if differences:
        raise RequestMismatchError(
            f"{path} was started from another request ({'; '.join(differences)}); repeat the first request, "
            "choose another --out (out=), or start over with --overwrite (overwrite=True)"
        )


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, kw_only=True)
class Owner(Open):
    """Who holds a lock."""

    host: str
    boot: str
    pid: int
    start: str | None
    space: str | None = None
    token: str = ""


@dataclass(frozen=True, kw_only=True)
class Checksum(Open):
    """The record of a single file."""

    crc32c: int


@dataclass(frozen=True, kw_only=True)
class Fence:
    """Which lock work belongs to, wherever it is done: work whose run has ended writes nothing any more."""

    folder: str
    name: str
    token: str

    def _said(self) -> bytes:
        """What the lock says; nothing if it is gone."""
        try:
            if is_address(self.folder):
                return located(self.folder).read(self.name)
            with open(Path(self.folder, self.name), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return b""

    def ended(self) -> bool:
        """Whether the lock was given up or taken over."""
        return self.token.encode() not in self._said()

    def asked_to_end(self) -> bool:
        """Whether work should stop where it is: its run was interrupted, or has ended."""
        said = self._said()
        return self.token.encode() not in said or b'"ending": true' in said

    def require(self) -> None:
        """Refuse to go on without the lock.

        Raises
        ------
        LockedError
            If its file names another owner, or is gone.
        """
        if self.ended():
            raise LockedError(
                f"{self.folder}: this run has ended, or another one took its lock over while it stood still; nothing "
                "more is written: wait for the other one, then run the same command again"
            )


class Lock:
    """A claim on a range of units or items, kept alive by a heartbeat.

    The owner is named by host, boot, namespace of process ids, process id and process start. A lock whose owner is gone
    is taken over: at once where that can be seen from here, elsewhere only after its heartbeat has stood still for
    `lock_stale_seconds`. An owner that was taken for dead finds another token, or nothing, in its lock: then it is
    `lost`.
    """

    def __init__(
        self, files: Files, first: int, last: int, listener: Listener, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self.files, self.claim = files, {"first": first, "last": last}
        self.file = self.name(first, last)
        # Nobody else can see, or want, what has no address.
        self._where = files.address or RAM
        self._listener, self._asked_to_stop = listener, stop
        self._token = uuid.uuid4().hex
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._owner: dict[str, Any] = {}
        self._said = b""
        self._lost = False
        self._writing = threading.Lock()
        self._fence = self.fence

    @property
    def fence(self) -> Fence:
        """What a worker needs to know whether this lock is still held."""
        return Fence(folder=self._where, name=self.file, token=self._token)

    def announce_end(self) -> None:
        """Tell those who work under this lock elsewhere to save what they have and stop."""
        with contextlib.suppress(OSError, InvalidRequestError), self._writing:
            self._replace(ending=True)

    def lost(self) -> bool:
        """Whether another run holds what this one held; seen by the heartbeat."""
        return self._lost

    @staticmethod
    def name(first: int, last: int) -> str:
        """File of the lock on a range."""
        return f"{FOLDER}/lock-{first:07d}-{last:07d}.json"

    def __enter__(self) -> Lock:
        try:
            while not self._try_claim():
                pass
        except JacstoreError:
            raise
        except OSError as error:
            raise explain(error, Path(self._where, FOLDER), 0) from error
        self.files.fences.append(self._fence.require)
        self._thread = threading.Thread(target=self._beat, name="jacstore-heartbeat", daemon=True)
        self._thread.start()
        leaving.holds(self, self._release)
        return self

    def __exit__(self, *_: object) -> None:
        leaving.gave_up(self)
        if self._fence.require in self.files.fences:
            self.files.fences.remove(self._fence.require)
        self._release()

    def _release(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError, InvalidRequestError):
            owner = self._read(self.file)
            if owner is not None and owner.token == self._token:
                self.files.remove(self.file)

    def _try_claim(self) -> bool:
        """Claim the range unless a live process holds an overlapping one; wait for locks of other hosts."""
        with self._guard():
            remote = [name for name in self._overlapping() if not self._take_over(name)]
            if not remote:
                return self._write()
        for name in remote:
            owner = self._watch(name)
            with self._guard():
                # Somebody else may have watched it too and taken it over by now.
                if self._bytes(name) == owner:
                    self.files.remove(name)
        return False

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """One process at a time examines and writes locks."""
        with self.files.guard(f"{FOLDER}/.guard"):
            yield

    def _overlapping(self) -> list[str]:
        found = []
        for name in self.files.names(FOLDER):
            matched = re.fullmatch(r"lock-([0-9]{7,19})-([0-9]{7,19})\.json", name)
            if matched and int(matched[1]) <= self.claim["last"] and self.claim["first"] <= int(matched[2]):
                found.append(f"{FOLDER}/{name}")
        return found

    def _bytes(self, name: str) -> bytes:
        """The bytes of a lock file; empty if it is gone."""
        try:
            return self.files.read(name)
        except FileNotFoundError:
            return b""

    def _read(self, name: str) -> Owner | None:
        """The owner that a lock names; None if the file is gone or torn."""
        try:
            return typed(Owner, parse(self._bytes(name), name), name)
        except DamagedDataError:
            return None

    def _take_over(self, name: str) -> bool:
        """Remove the lock of a dead owner; False if it cannot be judged from here whether the owner is dead."""
        owner = self._read(name)
        if owner is None:
            # Torn: its writer died between creating and filling it.
            self.files.remove(name)
            return True
        alive = machine.is_alive(owner.host, owner.boot, owner.space, owner.pid, owner.start)
        if alive is None:
            return False
        if alive:
            raise LockedError(
                f"{self._where} is being worked on by process {owner.pid} on this host; wait for it, "
                "stop it, or work on another part (--part I/N, part=)"
            )
        self.files.remove(name)
        return True

    def _watch(self, name: str) -> bytes:
        """Wait until a foreign lock is gone or its heartbeat has stood still long enough; return what it said."""
        owner = self._bytes(name)
        named = self._read(name)
        if named is None:
            return owner
        host = named.host
        stale = LIMITS.lock_stale_seconds
        file = name.removeprefix(f"{FOLDER}/")
        self._listener(Waiting(reason=f"{file} was left by host {host}; waiting {stale:.0f} s for its heartbeat"))
        until = time.monotonic() + stale
        while time.monotonic() < until:
            if self._asked_to_stop():
                raise RunInterruptedError("interrupted while waiting for a lock")
            said = self._bytes(name)
            if not said:
                return owner
            if said != owner:
                raise LockedError(f"{self._where} is being worked on by host {host}; wait for it or stop it there")
            time.sleep(min(0.2, stale))
        return owner

    def _write(self) -> bool:
        """Put the lock in place; False if there is one after all."""
        self._owner = {**machine.this_process(), "token": self._token, "beat": 0} | self.claim
        self._said = json.dumps(self._owner).encode()
        return self.files.create(self.file, self._said)

    def _replace(self, **changed: Any) -> bool:
        """Change what the lock says; False if another process has, or it is gone."""
        owner = self._owner | changed
        said = json.dumps(owner).encode()
        if not self.files.replace(self.file, said, self._said):
            return False
        self._owner, self._said = owner, said
        return True

    def _beat(self) -> None:
        while not self._stop.wait(LIMITS.heartbeat_seconds):
            # An error of the file system says nothing about who holds it.
            with contextlib.suppress(OSError, InvalidRequestError), self._writing:
                if not self._replace(beat=self._owner["beat"] + 1):
                    self._lost = True
                    return

"""In: what has been finished, and what was asked for. Out: records on disk, refusals, and locks.

One small JSON file a finished piece of work. Only such a record makes work done; it is written last and in one step.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jacstore import machine
from jacstore.errors import Damaged, Interrupted, Locked, Mismatch, Refused
from jacstore.files import Files, Folder
from jacstore.progress import Listener, Waiting

FORMAT_VERSION = 1
FOLDER = "ledger"
HEARTBEAT_SECONDS = 5.0
# A lock of another host is dead after this long without a heartbeat, watched here: clocks of two hosts may differ.
STALE_SECONDS = 60.0


class Ledger:
    """Records of a store or kernel."""

    def __init__(self, files: Files) -> None:
        self.files = files

    def done(self, kind: str) -> list[int]:
        """Numbers of the finished pieces of work of one kind, ascending."""
        prefix = kind + "-"
        numbers = []
        for name in self.files.names(FOLDER):
            stem, _, ending = name.partition(".")
            number = stem.removeprefix(prefix)
            if stem.startswith(prefix) and ending == "json" and number.isdigit():
                numbers.append(int(number))
        return sorted(numbers)

    def record(self, kind: str, number: int, facts: Mapping[str, Any]) -> None:
        """Mark a piece of work as finished."""
        self.files.publish(record_name(kind, number), json.dumps(facts, separators=(",", ":")).encode())

    def read(self, kind: str, number: int) -> dict[str, Any]:
        """The record of a finished piece of work.

        Raises
        ------
        Damaged
            If the record is missing or not JSON.
        """
        return read_json(self.files, record_name(kind, number))

    def forget(self, kind: str, number: int) -> None:
        """Make a piece of work unfinished again."""
        self.files.remove(record_name(kind, number))


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
        found = json.loads(files.read(name))
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except (ValueError, UnicodeDecodeError):
        raise Damaged(f"{name} is not readable JSON") from None
    if not isinstance(found, dict):
        raise Damaged(f"{name} is not a JSON object")
    return found


def compare_requested(path: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to continue a job that was started from another request.

    Raises
    ------
    Mismatch
        Naming every field that differs.
    """
    differences = []
    for field in dict.fromkeys([*found, *wanted]):
        before, now = found.get(field), wanted.get(field)
        if before != now:
            differences.append(f"{field}: {_brief(before)} -> {_brief(now)}")
    if differences:
        raise Mismatch(
            f"{path} was started from another request ({'; '.join(differences)}); repeat the first request, "
            "choose another --out (out=), or start anew with --overwrite (overwrite=True)"
        )


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Lock:
    """A claim on a range of units or items, kept alive by a heartbeat.

    The owner is named by host, boot, process id and process start. A lock whose owner is gone is taken over: at once on
    this host, elsewhere only after its heartbeat has stood still for `STALE_SECONDS`.
    """

    def __init__(
        self, folder: Folder, first: int, last: int, listener: Listener, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self.folder = folder.root / FOLDER
        self.claim = {"first": first, "last": last}
        self.path = folder.root / self.name(first, last)
        self._listener, self._asked_to_stop = listener, stop
        self._token = uuid.uuid4().hex
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._owner: dict[str, Any] = {}

    @staticmethod
    def name(first: int, last: int) -> str:
        """File of the lock on a range."""
        return f"{FOLDER}/lock-{first:07d}-{last:07d}.json"

    def __enter__(self) -> Lock:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while not self._try_claim():
                pass
        except PermissionError as error:
            raise Refused(f"{self.folder} cannot be written ({error.strerror}); give another --out (out=)") from error
        self._thread = threading.Thread(target=self._beat, name="jacstore-heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError, ValueError):
            if json.loads(self.path.read_text())["token"] == self._token:
                self.path.unlink()

    def _try_claim(self) -> bool:
        """Claim unless somebody alive holds an overlapping range; wait for what cannot be judged from here."""
        with self._guard():
            remote = [path for path in self._overlapping() if not self._take_over(path)]
            if not remote:
                self._write()
                return True
        for path in remote:
            owner = self._watch(path)
            with self._guard():
                # Somebody else may have watched it too and taken it over by now.
                if path.exists() and path.read_text() == owner:
                    path.unlink()
        return False

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """One process of this host at a time examines and writes locks."""
        with open(self.folder / ".guard", "a") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            yield

    def _overlapping(self) -> list[Path]:
        found = []
        for path in sorted(self.folder.glob("lock-*.json")):
            try:
                _, first, last = path.stem.split("-")
                if int(first) <= self.claim["last"] and self.claim["first"] <= int(last):
                    found.append(path)
            except ValueError:
                continue
        return found

    def _take_over(self, path: Path) -> bool:
        """Remove the lock of a dead owner on this host; False if the owner is on another host."""
        try:
            owner = json.loads(path.read_text())
            host, boot, pid, start = owner["host"], owner["boot"], int(owner["pid"]), owner["start"]
        except FileNotFoundError:
            return True
        except (ValueError, KeyError, TypeError):
            # Torn: its writer died between creating and filling it.
            path.unlink(missing_ok=True)
            return True
        if host != machine.hostname():
            return False
        if boot == machine.boot_id() and machine.process_start(pid) == start:
            raise Locked(
                f"{path.parent.parent} is being worked on by process {pid} on this host; wait for it, "
                "stop it, or work on another part (--part I/N, part=)"
            )
        path.unlink(missing_ok=True)
        return True

    def _watch(self, path: Path) -> str:
        """Wait until a foreign lock is gone or its heartbeat has stood still long enough; return what it said."""
        owner = path.read_text() if path.exists() else ""
        try:
            host = json.loads(owner)["host"]
        except (ValueError, KeyError, TypeError):
            return owner
        self._listener(
            Waiting(reason=f"{path.name} was left by host {host}; waiting {STALE_SECONDS:.0f} s for its heartbeat")
        )
        until = time.monotonic() + STALE_SECONDS
        while time.monotonic() < until:
            if self._asked_to_stop():
                raise Interrupted("interrupted while waiting for a lock")
            if not path.exists():
                return owner
            if path.read_text() != owner:
                raise Locked(f"{path.parent.parent} is being worked on by host {host}; wait for it or stop it there")
            time.sleep(min(0.2, STALE_SECONDS))
        return owner

    def _write(self) -> None:
        pid = os.getpid()
        owner = {
            "host": machine.hostname(),
            "boot": machine.boot_id(),
            "pid": pid,
            "start": machine.process_start(pid),
            "token": self._token,
            "beat": 0,
        } | self.claim
        self._owner = owner
        self._replace()

    def _replace(self) -> None:
        temporary = self.path.with_name(f".{self.path.name}.{self._token[:8]}.tmp")
        temporary.write_text(json.dumps(self._owner))
        os.replace(temporary, self.path)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            self._owner["beat"] += 1
            with contextlib.suppress(OSError):
                self._replace()

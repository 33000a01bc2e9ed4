"""Mutual exclusion by a file that only one process can create.

Locks of the operating system (flock) are not used: on many shared file systems they hold on one machine only, and some
have none.

What is held is a file that its holder created. It names a process, so that what a dead one left is taken over: at once
on this host, and when it has stood still for long where the holder cannot be asked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from jacstore.base import machine
from jacstore.base.limits import LIMITS

PAUSE_SECONDS = 0.01


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold `path` inside the block; wait for whoever holds it."""
    mine = claim()
    since, seen = time.monotonic(), ""
    while not _create(path, mine):
        found = _identity(path)
        if found != seen:
            since, seen = time.monotonic(), found
        if found and _is_dead(path, time.monotonic() - since):
            _take_away(path, found)
        else:
            time.sleep(PAUSE_SECONDS)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            # Another process took this one for dead and holds the file now: it stays.
            if path.read_bytes() == mine:
                path.unlink()


def claim() -> bytes:
    """A text that identifies this process and no other one."""
    return json.dumps({**machine.this_process(), "token": uuid.uuid4().hex}).encode()


def _create(path: Path, mine: bytes) -> bool:
    """Create a file unless there is one."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, mine)
    finally:
        os.close(descriptor)
    return True


def _take_away(path: Path, identity: str) -> None:
    """Remove what a dead process holds, and never what somebody has created since.

    Only one may remove it: whoever holds a name made of it, which may itself be left by a process that died.
    """
    with held(path.with_name(f"{path.name[:40]}.{identity}")):
        if _identity(path) == identity:
            path.unlink()


def _identity(path: Path) -> str:
    """A hash that no two files of this name share; empty if there is none."""
    try:
        body, found = path.read_bytes(), path.stat()
    except FileNotFoundError:
        return ""
    return hashlib.blake2b(body + f"{found.st_ino} {found.st_mtime_ns}".encode(), digest_size=8).hexdigest()


def _is_dead(path: Path, unchanged: float) -> bool:
    try:
        return is_dead(path.read_bytes(), unchanged)
    except FileNotFoundError:
        return False


def is_dead(claimed: bytes, unchanged: float) -> bool:
    """Whether the holder is no more, as far as can be said after so many seconds in which nothing changed."""
    try:
        owner = json.loads(claimed)
        host, boot, pid, start = (owner[name] for name in ("host", "boot", "pid", "start"))
        alive = machine.is_alive(host, boot, owner.get("space"), int(pid), start)
    except (ValueError, TypeError, KeyError):
        # Torn: its maker died, or is about to fill it.
        return unchanged > LIMITS.guard_stale_seconds
    return unchanged > LIMITS.guard_stale_seconds if alive is None else not alive

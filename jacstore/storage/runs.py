"""What past runs said of themselves, kept beside the result: seconds, counts and memory for a report to show."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from jacstore.errors import DamagedDataError, InvalidRequestError
from jacstore.storage.files import Folder
from jacstore.storage.ledger import Ledger, readable

KIND, CONFIG = "run", "config"
# Older ones are removed, so that a folder that is verified every night does not fill up.
MOST_KEPT = 20


def keep_run(ledger: Ledger, command: str, facts: Mapping[str, Any]) -> None:
    """Keep the report of a run that did something. It is never worth failing for, and none is kept in RAM.

    Its number is the time in microseconds: runs of several parts end at the same time and know nothing of each other.
    """
    if not isinstance(ledger.files, Folder):
        return
    with contextlib.suppress(OSError, ValueError, InvalidRequestError, DamagedDataError):
        ledger.record(KIND, time.time_ns() // 1000, {"command": command, **facts})
        for number in ledger.done(KIND)[:-MOST_KEPT]:
            ledger.forget(KIND, number)


def keep_config(ledger: Ledger, settings: Mapping[str, Any]) -> None:
    """Keep what a file of settings asked for, in place of that of an earlier run; never worth failing for."""
    if isinstance(ledger.files, Folder):
        with contextlib.suppress(OSError, ValueError, InvalidRequestError, DamagedDataError):
            ledger.record(CONFIG, 0, settings)


def kept_config(ledger: Ledger) -> dict[str, Any]:
    """What the last file of settings asked for; empty if there was none."""
    found, _ = readable(lambda number: ledger.read(CONFIG, number), ledger.done(CONFIG)[:1])
    return found[0] if found else {}


def kept_runs(ledger: Ledger) -> list[dict[str, Any]]:
    """Reports of past runs, the oldest first, each with `ended`, seconds since 1970; damaged ones are left out."""
    found, _ = readable(lambda number: {"ended": number / 1e6, **ledger.read(KIND, number)}, ledger.done(KIND))
    return found

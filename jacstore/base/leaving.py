"""Release what outlives the process, such as locks and temporary folders, if it leaves in the middle of work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

_HELD: dict[int, Callable[[], Any]] = {}


def holds(owner: object, release: Callable[[], Any]) -> None:
    """Have `release` called if the process leaves before `gave_up(owner)`."""
    _HELD[id(owner)] = release


def gave_up(owner: object) -> None:
    """Forget `owner`, which has released what it held."""
    _HELD.pop(id(owner), None)


def give_all_up() -> None:
    """Release everything that is held; what cannot be released stays, as after a kill."""
    while _HELD:
        with contextlib.suppress(Exception):
            _HELD.popitem()[1]()

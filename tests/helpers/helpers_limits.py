"""Other limits for a while: small problems then meet what large ones do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from jacstore.base.limits import LIMITS


@contextlib.contextmanager
def limited(**changes: Any) -> Iterator[None]:
    """Give fields of `LIMITS` other values, and theirs back afterwards."""
    before = {name: getattr(LIMITS, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(LIMITS, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(LIMITS, name, value)

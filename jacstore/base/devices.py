"""In: what JAX was told. Out: the devices it computes on, or one line that says what is missing."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any

import jax

from jacstore.errors import InvalidRequestError


def device() -> Any:
    """The device that JAX computes on.

    Raises
    ------
    InvalidRequestError
        If the platform that was asked for is not there.
    """
    try:
        return jax.devices()[0]
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()) or "its plug-in did not start"
        asked = os.environ.get("JAX_PLATFORMS", "")
        raise InvalidRequestError(
            f"JAX_PLATFORMS={asked}: no such device here ({reason}); install jaxlib for it "
            '(pip install "jacstore[cuda]") or set JAX_PLATFORMS=cpu'
        ) from error


def local_devices(asked: Any = None) -> list[Any]:
    """The devices of this process that are asked for: all, the first N, or those of some numbers.

    Raises
    ------
    InvalidRequestError
        If there is no such device.
    """
    device()
    there = jax.local_devices()
    try:
        wanted = _numbers(asked, len(there))
    except (TypeError, ValueError):
        wanted = []
    if not wanted or len(set(wanted)) < len(wanted) or not all(0 <= n < len(there) for n in wanted):
        several = isinstance(asked, Sequence) and not isinstance(asked, str)
        given = ",".join(map(str, asked)) if several else asked
        raise InvalidRequestError(
            f"--devices {given}: allowed are all, a count from 1 to {len(there)}, or different numbers from 0 to "
            f"{len(there) - 1} such as 0,2 (devices=)"
        )
    return [there[n] for n in wanted]


def _numbers(asked: Any, count: int) -> list[int]:
    """Numbers of the devices that are asked for, of `count`; a count that is too large names one that is not there."""
    if asked in (None, "all"):
        return list(range(count))
    if isinstance(asked, str):
        return [int(n) for n in asked.split(",")] if "," in asked else list(range(int(asked)))
    if isinstance(asked, Sequence):
        return [operator.index(n) for n in asked]
    return list(range(operator.index(asked)))


def device_budget(given: int | None, memory: int) -> int:
    """Bytes a pass may take: on a CPU a quarter of the host budget, elsewhere three quarters of the device."""
    where = device()
    if given is not None:
        return given
    if where.platform == "cpu":
        return memory // 4
    stats = where.memory_stats() or {}
    return int(stats.get("bytes_limit", 4 * memory) * 3 // 4)

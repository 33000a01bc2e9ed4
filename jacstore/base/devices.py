"""The device that JAX computes on, and how much of its memory a pass may use."""

from __future__ import annotations

import os
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


def device_budget(given: int | None, memory: int) -> int:
    """Bytes a pass may take: on a CPU a quarter of the host budget, elsewhere three quarters of the device."""
    where = device()
    if given is not None:
        return given
    if where.platform == "cpu":
        return memory // 4
    stats = where.memory_stats() or {}
    return int(stats.get("bytes_limit", 4 * memory) * 3 // 4)

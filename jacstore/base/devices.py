"""The devices that JAX computes on and how much of their memory may be used, or one line that says what is missing."""

from __future__ import annotations

import os
from fractions import Fraction
from typing import Any

import jax

from jacstore.base.budget import ACCELERATOR, Budget
from jacstore.base.options import Devices, parse_devices
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


def on_accelerator() -> bool:
    """Whether the device has memory of its own."""
    return bool(device().platform != "cpu")


def device_memory(given: int | None, budget: Budget) -> int:
    """Bytes that programs may take: on the accelerator, or on a CPU the part `device_pass` of the budget.

    `given` is `--device-memory`. On a CPU it takes the place of the part, up to all of the budget; whoever gives it
    proves that the other parts fit beside what the program turns out to need.
    """
    if not on_accelerator():
        return budget["device_pass"] if given is None else min(given, budget.total)
    return given or accelerator_memory() or budget.total


def accelerator_memory() -> int:
    """Bytes of the accelerator that are used if `--device-memory` does not say; 0 if the device does not tell."""
    stats = device().memory_stats() or {}
    return Budget(int(stats.get("bytes_limit", 0))).split(**ACCELERATOR)["jacstore"]


def where_from(given: int | None, share: Fraction) -> tuple[str, str]:
    """Where the memory of programs comes from, and what to change, as an error says it; `share` of a CPU's memory."""
    if on_accelerator() or given is not None:
        return "--device-memory", "--device-memory (device_memory=)"
    return f"the part device_pass ({share}) of --memory", "--memory (memory=)"


def local_devices(asked: Devices = None) -> list[Any]:
    """The devices of this process that are asked for: all, the first N, or those of some numbers.

    Raises
    ------
    InvalidRequestError
        If there is no such device.
    """
    device()
    there = jax.local_devices()
    parsed = parse_devices(asked, "--devices")
    if parsed is None or isinstance(parsed, str):
        return there
    # A count that is too large names a device that is not there.
    wanted = parsed if isinstance(parsed, tuple) else tuple(range(parsed))
    if not wanted or len(set(wanted)) < len(wanted) or not all(0 <= n < len(there) for n in wanted):
        given = ",".join(map(str, parsed)) if isinstance(parsed, tuple) else parsed
        raise InvalidRequestError(
            f"--devices {given}: allowed are all, a count from 1 to {len(there)}, or different numbers from 0 to "
            f"{len(there) - 1} such as 0,2 (devices=)"
        )
    return [there[n] for n in wanted]

"""The options of a gram, for keywords and flags alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jacstore.base.limits import BLAS_PRECISIONS, PRECISIONS
from jacstore.base.modes import Mode
from jacstore.base.options import Options, count, devices, host_memory, one_part, other, size, switch, word
from jacstore.errors import InvalidRequestError

KERNEL_DTYPES = ("float64", "float32")
ENGINES = ("auto", "blas", "xla")


def _scheduler(given: Any, flag: str) -> str:
    if given not in ("threads", "processes") and "://" not in str(given):
        raise InvalidRequestError(f"{flag} {given}: allowed are threads, processes or an address (scheduler=)")
    return str(given)


@dataclass(frozen=True, kw_only=True)
class GramOptions(Options):
    """What a gram is asked for, beside its stores and the folder; checked when it is made."""

    memory: int = host_memory("Host memory for all workers together. [default: half of what is available]")
    device_memory: int | None = size("Accelerator memory to use. [default: three quarters of it]")
    mode: str = word(
        "full",
        tuple(mode.value for mode in Mode),
        "All entries, their sum over outputs, one kernel per output, or each example with itself.",
    )
    dtype: str = word("float64", KERNEL_DTYPES, "Type of the stored kernel.")
    precision: str | None = word(
        None,
        PRECISIONS,
        "Type of the products; bf16x3 to bf16x9 split float32 into bfloat16, fast means 16-bit or TF32. "
        "[default: from the store]",
    )
    engine: str = word("auto", ENGINES, "What multiplies: BLAS or JAX's XLA.")
    tile: int | None = count("Edge of a kernel tile in examples. [default: from the memory]")
    by_leaf: bool = switch("Keep one kernel per parameter leaf.")
    triangle: bool = switch("Store only tiles on and above the diagonal.")
    exact_diagonal: bool = switch("Put the norms computed before rounding on the diagonal.")
    part: tuple[int, int] = one_part("Only part I of N of the items, counted from 1.")
    scheduler: str = other("threads", _scheduler, "threads, processes or tcp://HOST:PORT.")
    workers: int | None = count("Processes to share the work. [default: as many as there are]")
    devices: str | int | tuple[int, ...] | None = devices("Devices that multiply, with --engine xla. [default: all]")
    overwrite: bool = switch("Delete what is there and start over.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scheduler == "threads" and (self.workers or 1) > 1:
            raise InvalidRequestError(
                "--workers: threads run one item at a time on all cores; use --scheduler processes (scheduler=)"
            )
        if self.triangle and Mode(self.mode).within_examples:
            raise InvalidRequestError(
                "--triangle: mode blocks holds nothing off the diagonal; leave it out (triangle=)"
            )
        if self.engine == "blas" and self.precision not in (None, *BLAS_PRECISIONS):
            raise InvalidRequestError(
                f"--precision {self.precision}: BLAS has no such products; use --engine xla (engine=) or float32 "
                "(precision=)"
            )

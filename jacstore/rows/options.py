"""The options of a build, for JAX and PyTorch, for keywords and flags alike."""

from __future__ import annotations

from dataclasses import dataclass

from jacstore.base.limits import CODECS, DTYPES
from jacstore.base.options import Options, count, devices, host_memory, one_part, pair, size, switch, word
from jacstore.errors import InvalidRequestError

LAYOUTS = ("auto", "dense", "factored")


@dataclass(frozen=True, kw_only=True)
class BuildOptions(Options):
    """What a build is asked for, beside the problem and the folder; checked when it is made."""

    memory: int = host_memory("Host memory to use, such as 8GB. [default: half of what is available]")
    device_memory: int | None = size("Accelerator memory to use. [default: three quarters of it]")
    dtype: str = word("float32", DTYPES, "Type of the stored rows and factors.")
    layout: str = word("auto", LAYOUTS, "Store rows, or factors where possible.")
    batch_size: int | None = count("Examples per device pass. [default: from the memory]")
    output_batch: int | None = count("Outputs per device pass. [default: from the memory]")
    unit_size: int | None = count("Examples per unit, the part that is resumed. [default: from the memory]")
    codec: str = word("auto", ("auto", *CODECS), "Compression. auto measures which pays.")
    examples: tuple[int, int] | None = pair("A:B", "Only these examples; they define the N of the store.")
    part: tuple[int, int] = one_part("Only part I of N, counted from 1; parts may run anywhere, in any order.")
    devices: str | int | tuple[int, ...] | None = devices("Devices that compute batches in turn. [default: all]")
    allow_nonfinite: bool = switch("Store rows that hold NaN or infinity instead of stopping.")
    overwrite: bool = switch("Delete what is there and start over.")

    def range_of(self, n_examples: int) -> tuple[int, int]:
        """The examples that are asked for, `first` to `last - 1` of so many."""
        first, last = self.examples or (0, n_examples)
        if not 0 <= first < last <= n_examples:
            raise InvalidRequestError(
                f"--examples {first}:{last}: allowed are ranges A:B with 0 <= A < B <= {n_examples} (examples=)"
            )
        return first, last

    @property
    def float64(self) -> bool:
        """Whether rows are computed in float64, not in the parameters' own precision."""
        return self.dtype == "float64"

"""Who may take how much of `--memory`: a budget that is split by name, and the shares of every job.

A share says how large something is *chosen*, before anything is known of the data. What a user chooses, or a program
turns out to need, is counted in bytes and takes the place of its share; `Budget.split` refuses parts that do not fit.
So the parts of a plan always add up to at most `--memory`. What no part has is left for whatever a job does beside
them, such as the rows that a caller holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType

from jacstore.errors import InvalidRequestError

Shares = Mapping[str, Fraction]

# A process that is told nothing takes half of the memory that is available: the user's own arrays, the page cache and
# other processes live from the other half. Of an accelerator it takes three quarters: nobody else computes there, but
# libraries keep work spaces of their own.
DEFAULT: Shares = {"host": Fraction(1, 2)}
ACCELERATOR: Shares = {"jacstore": Fraction(3, 4)}

# `build`. Two units are alive, one being filled and one being written, so that a chosen unit takes an eighth. The
# program of the device pass is compiled to fit a quarter; where the rest allows, further passes are begun before the
# first has ended. Gradients that rows are compared with are small beside the rows of a unit. The remaining 7/16 are for
# inputs, those further passes, and a store that stays in RAM: `jacstore.rows.overlap` gives them out by need.
BUILD: Shares = {"unit_buffers": Fraction(1, 4), "device_pass": Fraction(1, 4), "row_check": Fraction(1, 16)}

# `jacstore.torch.build`. As above, but what a pass takes is an estimate from what autograd keeps of one example, so
# that it is chosen to fill half of that share, or of the accelerator's memory. Inputs, the audit by plain autograd and
# a store in RAM take the rest.
TORCH_BUILD: Shares = {"unit_buffers": Fraction(1, 4), "device_pass": Fraction(1, 4)}
TORCH_PASS: Shares = {"estimated": Fraction(1, 2)}

# What the layout of a store expects of a later `gram` with the same memory: a slab of all rows, one chunk wide, takes
# an eighth of it. It is read and held once more in the order in which it is multiplied.
GRAM_SLAB: Shares = {"slab": Fraction(1, 8), "slab_as_multiplied": Fraction(1, 8)}

# `gram` counts everything in bytes, for each worker in its equal part: see `jacstore.kernels.plan.memory`. On an
# accelerator half of its memory is for accumulators that stay there; the other half for slabs and their products.
GRAM_ON_ACCELERATOR: Shares = {"accumulators": Fraction(1, 2), "products": Fraction(1, 2)}

# `operator`. Two slabs of rows are alive: one is multiplied while the next is read. Products of factors with columns
# need two arrays of intermediate products. The rest holds the columns, the result, and units of factors: in bytes.
OPERATOR: Shares = {"slabs": Fraction(1, 4), "scratch": Fraction(1, 32)}

# Operators by automatic differentiation. The program takes a quarter; columns, their product and the inputs that are
# read ahead take the rest, counted in bytes.
AUTODIFF: Shares = {"device_pass": Fraction(1, 4), "columns": Fraction(3, 4)}

# `verify`. Rows of both stores in float64, two slabs of them while the next takes the place of the last; the products
# Jᵀ z; and squared norms of stored rows. The rest holds a tile and the rows of the entries that are looked at.
VERIFY: Shares = {"rows": Fraction(1, 2), "sums": Fraction(1, 4), "norms": Fraction(3, 16)}

# Squared norms of stored rows: decoded rows, or products of pairs of positions where a leaf is stored by factors.
NORMS: Shares = {"rows": Fraction(2, 3), "pairs": Fraction(1, 3)}

# What `build --dry-run` compares with: a kernel without a store holds blocks of rows that fill half of the memory.
WITHOUT_STORE: Shares = {"rows": Fraction(1, 2)}

# Posterior samples, tests of them and factorizations count in bytes: see `jacstore.inference`.
JOBS: Mapping[str, Shares] = {
    "default": DEFAULT,
    "accelerator": ACCELERATOR,
    "build": BUILD,
    "torch build": TORCH_BUILD,
    "torch pass": TORCH_PASS,
    "layout": GRAM_SLAB,
    "gram on an accelerator": GRAM_ON_ACCELERATOR,
    "operator": OPERATOR,
    "autodiff": AUTODIFF,
    "verify": VERIFY,
    "norms": NORMS,
    "without a store": WITHOUT_STORE,
}


@dataclass(frozen=True)
class Budget:
    """Bytes that are given out by name.

    Parameters
    ----------
    total
        Bytes to give out, at least 0.
    parts
        What has been given out: name -> bytes. They add up to at most the total.

    Raises
    ------
    InvalidRequestError
        If a part is negative, or the parts take more than the total.
    """

    total: int
    parts: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", MappingProxyType(dict(self.parts)))
        if self.left < 0 or min(self.parts.values(), default=0) < 0:
            shown = ", ".join(f"{name} {size:,}" for name, size in self.parts.items())
            raise InvalidRequestError(
                f"--memory {self.total:,}: its parts take {sum(self.parts.values()):,} bytes ({shown}); give at least "
                "that (memory=)"
            )

    def split(self, **parts: Fraction | int) -> Budget:
        """This budget with further parts, each a share of the total (a fraction) or bytes (an integer)."""
        sizes = {name: int(self.total * part if isinstance(part, Fraction) else part) for name, part in parts.items()}
        return Budget(self.total, {**self.parts, **sizes})

    def __getitem__(self, name: str) -> int:
        return self.parts[name]

    @property
    def left(self) -> int:
        """Bytes that no part has."""
        return self.total - sum(self.parts.values())

    def beside(self, **needs: int) -> int:
        """Bytes that would be left beside further needs; below 0 if they do not fit."""
        return self.left - sum(needs.values())

    def each(self, count: int) -> int:
        """Bytes for each of `count` that share the total equally."""
        return self.total // count

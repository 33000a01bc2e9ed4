"""What commands without a report of their own in the API say, as values whose fields are the keys of their JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jacstore.base.schema import Reported

if TYPE_CHECKING:
    from jacstore.storage.kept_arrays import KeptFactorization


@dataclass(frozen=True, kw_only=True)
class CleanReport(Reported):
    """What `jacstore clean` removed."""

    kernel: str
    removed: list[KeptFactorization]
    bytes_freed: int


@dataclass(frozen=True, kw_only=True)
class PredictReport(Reported):
    """What `jacstore predict` fitted and wrote."""

    predictions: str
    kernel: str
    cross: str
    examples: int
    predicted: int
    columns: int
    alpha: float
    alphas: list[float]
    from_network: bool
    loo_error: float
    loo_accuracy: float | None
    factor_reused: bool
    seconds_total: float


@dataclass(frozen=True, kw_only=True)
class SampleReport(Reported):
    """What `jacstore sample` drew and wrote."""

    file: str
    samples: int
    parameters: int
    passes: float
    seconds_total: float

"""What a store says of itself, as values whose fields are the keys of its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jacstore.base.schema import Reported


@dataclass(frozen=True, kw_only=True)
class LeafFacts(Reported):
    """One leaf: its terms, why these, and the numbers that they store per example against those of its rows."""

    path: str
    shape: list[int]
    terms: list[str]
    why: str
    numbers: int
    numbers_dense: int


@dataclass(frozen=True, kw_only=True)
class StoreInfo(Reported):
    """Sizes, choices and state of a store, as `jacstore info --json` prints them."""

    store: str
    examples: int
    outputs: int
    parameters: int
    leaves: list[LeafFacts]
    left_out: list[list[str]]
    units_total: int
    units_done: int
    units_damaged: Sequence[int]
    bytes_stored: int
    bytes_dense: int
    zero_rows: int
    zero_leaves: list[str]
    nonfinite_examples: list[int]
    complete: bool
    format_version: int
    fingerprint: dict[str, Any]
    dtype: str
    codecs: list[str]
    versions: dict[str, str]
    numerics: dict[str, Any]

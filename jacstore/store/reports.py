"""What a store says of itself, as values whose fields are the keys of its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jacstore.base.schema import Reported

if TYPE_CHECKING:
    from jacstore.terms.kinds import Leaf, Operand


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


def leaf_table(leaves: Sequence[Leaf], operands: Sequence[Operand], n_outputs: int) -> list[LeafFacts]:
    """For each leaf its path, shape, terms, the reason, and numbers stored per example against those of its rows.

    A factor that several leaves share is counted with the largest of them.
    """
    sizes = {operand.name: operand.numbers(n_outputs) for operand in operands}
    counted = {}
    for leaf in sorted(leaves, key=lambda leaf: -leaf.size):
        counted[leaf.path] = sum(sizes.pop(name, 0) for name in leaf.operands)
    table = []
    for leaf in leaves:
        dense = leaf.size * n_outputs
        table.append(
            LeafFacts(
                path=leaf.path,
                shape=list(leaf.shape),
                terms=[term.kind for term in leaf.terms],
                why=leaf.why,
                numbers=dense if leaf.dense else counted[leaf.path],
                numbers_dense=dense,
            )
        )
    return table

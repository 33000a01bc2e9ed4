"""What a store was asked for, and whether a store that was begun is the one that is asked for now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jacstore.errors import RequestMismatchError
from jacstore.storage.ledger import compare_requested
from jacstore.store.reader import JacobianStore
from jacstore.terms.kinds import Constant, Leaf


def request_of(
    leaves: Sequence[Leaf], n_examples: int, n_outputs: int, dtype: str, more: Mapping[str, Any]
) -> dict[str, Any]:
    """The request of a store; a store that was begun from another request is not continued."""
    return {
        "leaves": [[leaf.path, list(leaf.shape)] for leaf in leaves],
        "n_examples": n_examples,
        "n_outputs": n_outputs,
        "dtype": dtype,
        **more,
    }


def require_same(
    store: JacobianStore, wanted: Mapping[str, Any], leaves: Sequence[Leaf], unit_size: int | None
) -> None:
    """Refuse to continue a store that was begun from another request, by other terms or in other units.

    Raises
    ------
    RequestMismatchError
        Naming what differs.
    """
    compare_requested(store.path, store.requested, wanted)
    stored, given = ([leaf.with_constants(_any_content).terms for leaf in side] for side in (store.leaves, leaves))
    if stored != given:
        raise RequestMismatchError(
            f"{store.path}: its leaves are stored by other terms than these versions of jacstore and JAX find (it was "
            f"begun with JAX {store.versions.get('jax')}); use the first versions, or start over with --overwrite "
            "(overwrite=True)"
        )
    if unit_size is not None and min(unit_size, store.n_examples) != store.unit_size:
        raise RequestMismatchError(
            f"{store.path}: unit_size: {store.unit_size} -> {min(unit_size, store.n_examples)}; repeat the first "
            "--unit-size (unit_size=) or start over with --overwrite (overwrite=True)"
        )


def _any_content(constant: Constant) -> Constant:
    """Other machines and versions may round a constant otherwise: the first one is kept."""
    return replace(constant, digest="")

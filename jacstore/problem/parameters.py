"""Split parameters into the leaves that the Jacobian has columns for and the others, each with a reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jacstore.errors import InvalidRequestError
from jacstore.problem.pytrees import computed, dtype_of, is_kind, own, paths_and_leaves, type_name
from jacstore.problem.user_errors import kind_of, reraise_user_error

PATHS_SHOWN = 5
# Names of state that training keeps beside the parameters: collections and leaves of Flax, Haiku, Keras, PyTorch.
STATE = r"(^|[/.])(batch_stats|running_(mean|var)|moving_(mean|var|variance))([/.]|$)"


@dataclass(frozen=True, kw_only=True)
class SelectedLeaf:
    """One parameter array that the Jacobian has columns for."""

    path: str
    shape: tuple[int, ...]
    dtype: str


def state_among(paths: Iterable[str]) -> str:
    """A warning about selected leaves that look like running statistics; empty if there are none."""
    found = [path for path in paths if re.search(STATE, path)]
    if not found:
        return ""
    shown = ", ".join(repr(path) for path in found[:PATHS_SHOWN]) + (", …" if len(found) > PATHS_SHOWN else "")
    return (
        f"{len(found)} selected leaves of params look like running statistics, not parameters ({shown}); the Jacobian "
        f"has columns for them; leave them out by select=r'^(?!.*{STATE})'"
    )


def check_select(select: Any) -> None:
    """Refuse a `select` that is neither a regular expression nor a predicate."""
    if select is None or callable(select):
        return
    if not isinstance(select, str):
        raise InvalidRequestError(
            f"select is a {kind_of(select)}; allowed are a regular expression, a predicate on the path, or None; "
            "change select="
        )
    try:
        re.compile(select)
    except re.error as error:
        raise InvalidRequestError(f"select {select!r} is not a regular expression: {error}; change select=") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class Parameters:
    """The leaves of params in tree order, each `selected`, `rest`, or `fixed` (no array: closed over)."""

    treedef: Any
    roles: tuple[str, ...]
    selected: list[Any]
    rest: list[Any]
    fixed: list[Any]
    leaves: tuple[SelectedLeaf, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def all_selected(self) -> bool:
        """Whether every floating leaf is selected."""
        return not any(jnp.issubdtype(leaf.dtype, np.floating) for leaf in self.rest)

    def join(self, selected: list[Any], rest: list[Any]) -> Any:
        """The pytree that `apply` expects."""
        streams = {"selected": iter(selected), "rest": iter(rest), "fixed": iter(self.fixed)}
        return jax.tree_util.tree_unflatten(self.treedef, [next(streams[role]) for role in self.roles])


def split_parameters(params: Any, select: str | Callable[[str], bool] | None, float64: bool) -> Parameters:
    """Give every leaf its role; floating leaves are upcast with `float64`.

    Raises
    ------
    InvalidRequestError
        If a leaf is complex, two share a path, or no floating number is selected.
    """
    with reraise_user_error("params is not a pytree:", "change params="):
        named = paths_and_leaves(params)
    repeated = [path for path, count in Counter(path for path, _ in named).items() if count > 1]
    if repeated:
        raise InvalidRequestError(
            f"params has two leaves with path {repeated[0]!r}; paths have to differ; rename one in params="
        )
    types = {path: dtype_of(leaf) for path, leaf in named}
    for path, dtype in types.items():
        if is_kind(dtype, np.complexfloating):
            raise InvalidRequestError(
                f"params leaf {path!r} is {dtype}; leaves have to be real; hold its real and imaginary parts as two "
                "leaves of params=, or close over it"
            )
    floating = [path for path, dtype in types.items() if is_kind(dtype, np.floating)]
    if not floating:
        given = ", ".join(f"{path!r}: {type_name(leaf)}" for path, leaf in named[:PATHS_SHOWN]) or "no leaf at all"
        raise InvalidRequestError(
            f"params has no floating-point leaf ({given}); at least one is needed; change params="
        )
    chosen = _chosen_paths(floating, select)
    if not any(np.size(leaf) for path, leaf in named if path in chosen):
        raise InvalidRequestError("the selected leaves of params hold no number (P = 0); change params= or select=")

    groups: dict[str, list[Any]] = {"selected": [], "rest": [], "fixed": []}
    roles, leaves, left_out = [], [], []
    for path, leaf in named:
        role = "selected" if path in chosen else "fixed" if types[path] is None else "rest"
        value = leaf if role == "fixed" else own(computed(leaf, float64))
        roles.append(role)
        groups[role].append(value)
        if role == "selected":
            leaves.append(SelectedLeaf(path=path, shape=tuple(value.shape), dtype=str(value.dtype)))
        else:
            left_out.append((path, "not selected" if path in floating else f"not floating point ({type_name(leaf)})"))
    return Parameters(
        treedef=jax.tree_util.tree_structure(params),
        roles=tuple(roles),
        leaves=tuple(leaves),
        left_out=tuple(left_out),
        **groups,
    )


def _chosen_paths(paths: list[str], select: str | Callable[[str], bool] | None) -> set[str]:
    if select is None:
        return set(paths)
    matches = select if callable(select) else re.compile(select).search
    with reraise_user_error("select raised", "change select="):
        chosen = {path for path in paths if matches(path)}
    if not chosen:
        given = repr(select) if isinstance(select, str) else "the predicate"
        shown = ", ".join(repr(path) for path in paths[:PATHS_SHOWN]) + (", …" if len(paths) > PATHS_SHOWN else "")
        raise InvalidRequestError(f"select {given} matches no floating-point leaf; there are {shown}; change select=")
    return chosen

"""Leaves of pytrees with their paths and types, and as arrays of the types that JAX computes in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jacstore.errors import InvalidRequestError
from jacstore.problem.user_errors import kind_of


def paths_and_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Flatten `tree` to (path, leaf): keys joined by `/`, each percent-encoded; a bare leaf has the path `.`."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [("/".join(_component(entry) for entry in keys) if keys else ".", leaf) for keys, leaf in flat]


def replaced(tree: Any, values: Mapping[str, Any]) -> Any:
    """The same tree with other leaves at the paths of `values`.

    Raises
    ------
    InvalidRequestError
        If the tree has no leaf at such a path.
    """
    named = paths_and_leaves(tree)
    missing = sorted(set(values) - {path for path, _ in named})
    if missing:
        raise InvalidRequestError(
            f"the tree has no leaf {missing[0]!r}; give the parameters that the rows were taken for (like=)"
        )
    leaves = [values.get(path, leaf) for path, leaf in named]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), leaves)


def _component(entry: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            entry = getattr(entry, name)
            break
    return str(entry).replace("%", "%25").replace("/", "%2F")


def dtype_of(leaf: Any) -> Any:
    """The type of an array leaf; None for a leaf that is not an array and is closed over.

    Python ints and bools are closed over: networks branch on them and use them as sizes, which no traced value allows.
    """
    if isinstance(leaf, jax.Array):
        return leaf.dtype
    if isinstance(leaf, (float, complex)) or (hasattr(leaf, "__array__") and not isinstance(leaf, type)):
        dtype = np.asarray(leaf).dtype
        return dtype if jnp.issubdtype(dtype, np.number) or dtype == np.bool_ else None
    return None


def is_kind(dtype: Any, kind: Any) -> bool:
    """Whether a leaf of type `dtype`, None for no array, is of a kind such as `np.floating`."""
    return dtype is not None and jnp.issubdtype(dtype, kind)  # NumPy takes None for float64


def type_name(leaf: Any) -> str:
    """A name for the type of a leaf, array or not."""
    return kind_of(leaf) if dtype_of(leaf) is None else str(dtype_of(leaf))


def native(array: np.ndarray) -> np.ndarray:
    """The same numbers in this machine's byte order, and long doubles as float64: JAX takes no other."""
    if array.dtype == np.longdouble:
        return array.astype(np.float64)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def computed(leaf: Any, float64: bool) -> Any:
    """`leaf` in the type that JAX computes in: float64 on request, else as its 64-bit setting says."""
    if isinstance(leaf, float) and not isinstance(leaf, np.generic):
        return jnp.asarray(leaf)  # stays weakly typed, as it is in the user's own calls
    if not isinstance(leaf, jax.Array):
        leaf = native(np.asarray(leaf))
    elif jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    wide = float64 and jnp.issubdtype(leaf.dtype, np.floating)
    dtype = np.dtype(np.float64) if wide else jax.dtypes.canonicalize_dtype(leaf.dtype)
    with np.errstate(over="ignore"):  # too large for float32 becomes infinite, which the probe or the build reports
        return leaf if leaf.dtype == dtype else leaf.astype(dtype)


def own(array: Any) -> jax.Array:
    """`array` in JAX's hands; a copy if it was NumPy's, whose memory JAX may share and the user may write to."""
    # `jnp.asarray` would compile a copy for every shape.
    return array if isinstance(array, jax.Array) else jax.device_put(array.copy())

"""Convert pytrees of parameters to columns of numbers and back, with leaves found by their paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jacstore.errors import InvalidRequestError


class ParameterColumns:
    """What an operator with a column for every parameter knows of them.

    Attributes
    ----------
    paths
        For each leaf its shape and columns: path -> (shape, slice).
    """

    paths: Mapping[str, tuple[tuple[int, ...], slice]]

    @property
    def n_parameters(self) -> int:
        """P."""
        return max(at.stop for _, at in self.paths.values())

    def ravel(self, tree: Any) -> np.ndarray:
        """Columns from a pytree of arrays: `(P,)` from leaves of the parameters' shapes, `(P, m)` from `(m, *shape)`.

        Leaves that the operator has no columns for are not looked at.

        Raises
        ------
        InvalidRequestError
            If a leaf is missing or has another shape.
        """
        from jacstore.problem.pytrees import paths_and_leaves

        return _joined(dict(paths_and_leaves(tree)), self.paths, self.n_parameters)

    def unravel(self, columns: np.ndarray, like: Any = None) -> Any:
        """Columns `(P,)` or `(P, m)` as a pytree of arrays of the parameters' shapes, or `(m, *shape)`.

        Without `like` a nested dict by the components of each path; with it a pytree of that structure, for instance
        the parameters, in which the operator's leaves are replaced.

        Raises
        ------
        InvalidRequestError
            If there are more or fewer columns than parameters, or `like` has not all of the leaves.
        """
        columns = np.asarray(columns)
        if columns.ndim not in (1, 2) or len(columns) != self.n_parameters:
            p = self.n_parameters
            raise InvalidRequestError(f"columns of shape {columns.shape}; allowed are ({p},) and ({p}, m)")
        parts = {}
        for path, (shape, at) in self.paths.items():
            held = columns[at]
            parts[path] = (
                held.reshape(shape) if held.ndim == 1 else np.moveaxis(held.reshape(*shape, held.shape[1]), -1, 0)
            )
        if like is None:
            return _nested(parts)
        from jacstore.problem.pytrees import replaced

        return replaced(like, parts)


def _joined(found: Mapping[str, Any], paths: Mapping[str, tuple[tuple[int, ...], slice]], width: int) -> np.ndarray:
    """Columns `(P,)` or `(P, m)` from arrays by path."""
    out: np.ndarray | None = None
    for path, (shape, at) in paths.items():
        if path not in found:
            raise InvalidRequestError(
                f"the tree has no leaf {path!r}; leaves are needed for {', '.join(map(repr, list(paths)[:5]))}"
            )
        values = np.asarray(found[path])
        lead = values.shape[: max(0, values.ndim - len(shape))]
        if len(lead) > 1 or values.shape[len(lead) :] != shape or (out is not None and lead != out.shape[1:]):
            wanted = f"{shape} or (m, {str(shape)[1:]}" if out is None else f"{(*out.shape[1:], *shape)}"
            raise InvalidRequestError(f"leaf {path!r} of shape {values.shape}; allowed is {wanted}")
        if out is None:
            out = np.empty((width, *lead), np.result_type(values.dtype, np.float32))
        out[at] = values.reshape(*lead, -1).T
    assert out is not None
    return out


def _nested(parts: Mapping[str, np.ndarray]) -> Any:
    """A nested dict by the components of each path; the array itself for a bare leaf."""
    if list(parts) == ["."]:
        return parts["."]
    tree: dict[str, Any] = {}
    for path, values in parts.items():
        *folders, name = (part.replace("%2F", "/").replace("%25", "%") for part in path.split("/"))
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = values
    return tree

"""In: arrays or a dataset. Out: N, and any run of examples as a pytree of NumPy arrays `(n, ...)`."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jacstore.blame import kind_of, naming
from jacstore.errors import Refused
from jacstore.pytrees import native, paths_and_leaves

READ_THREADS = 8


def is_dataset(inputs: Any) -> bool:
    """Whether `inputs` is one map-style dataset and not a pytree of arrays; containers have more than a leaf's tree."""
    is_leaf = jax.tree_util.all_leaves([inputs])
    return is_leaf and not hasattr(inputs, "shape") and hasattr(inputs, "__len__") and hasattr(inputs, "__getitem__")


class Arrays:
    """Examples held as a pytree of sliceable arrays.

    Raises
    ------
    Refused
        If a leaf has no first axis, or leaves differ in its length.
    """

    def __init__(self, inputs: Any) -> None:
        with naming("inputs is not a pytree:", "change inputs="):
            named = paths_and_leaves(inputs)
        if not named:
            raise Refused(
                "inputs holds no array; it has to be a pytree of arrays (N, ...) or a dataset; change inputs="
            )
        for path, leaf in named:
            if not getattr(leaf, "shape", ()):
                raise Refused(
                    f"inputs leaf {path!r} is a {kind_of(leaf)} without a first axis; every leaf has to be an array "
                    "(N, ...); change inputs="
                )
        lengths = {path: leaf.shape[0] for path, leaf in named}
        unknown = [path for path, length in lengths.items() if math.isnan(length)]
        if unknown:
            raise Refused(
                f"inputs leaf {unknown[0]!r} does not know its length; it has to be a number; "
                "call compute_chunk_sizes() on the Dask array of inputs="
            )
        if len(set(lengths.values())) > 1:
            given = ", ".join(f"{path!r}: {length}" for path, length in lengths.items())
            raise Refused(
                f"inputs leaves have different lengths ({given}); all need the N examples along their first "
                "axis; change inputs="
            )
        self.named = named
        self.treedef = jax.tree_util.tree_structure(inputs)
        self.n_examples = int(next(iter(lengths.values())))

    def read(self, start: int, stop: int) -> Any:
        """Examples `start` to `stop - 1`."""
        arrays = []
        for path, leaf in self.named:
            with naming(f"inputs leaf {path!r} raised at examples {start}:{stop}", "change inputs="):
                array = numeric(leaf[start:stop], f"inputs leaf {path!r}")
            if array.shape[:1] != (stop - start,):
                raise Refused(
                    f"inputs leaf {path!r} gave shape {array.shape} for examples {start}:{stop}; the first axis "
                    f"has to be {stop - start}; change inputs="
                )
            arrays.append(array)
        return jax.tree_util.tree_unflatten(self.treedef, arrays)


class Dataset:
    """Examples held as one map-style dataset."""

    def __init__(self, items: Any) -> None:
        self.items = items
        with naming("len(inputs) raised", "change inputs="):
            self.n_examples = len(items)

    @cached_property
    def first(self) -> tuple[list[tuple[str, np.ndarray]], Any]:
        """Item 0, whose structure, shapes and types all others have to share."""
        return self.item(0)

    def item(self, i: int) -> tuple[list[tuple[str, np.ndarray]], Any]:
        """Paths and leaves of item i, and its structure."""
        with naming(f"inputs[{i}] raised", "change the dataset given as inputs="):
            item = self.items[i]
            named = [(path, numeric(leaf, f"inputs[{i}] leaf {path!r}")) for path, leaf in paths_and_leaves(item)]
            return named, jax.tree_util.tree_structure(item)

    def read(self, start: int, stop: int) -> Any:
        """Examples `start` to `stop - 1`, each fetched by one of `READ_THREADS` threads."""
        named, treedef = self.first
        arrays = [np.empty((stop - start, *leaf.shape), leaf.dtype) for _, leaf in named]

        def fill(i: int) -> None:
            others, other_treedef = self.item(i)
            if other_treedef != treedef:
                raise Refused(
                    f"inputs[{i}] has the structure {other_treedef}, inputs[0] {treedef}; all examples need the "
                    "same; change inputs="
                )
            for array, (path, leaf), (_, other) in zip(arrays, named, others, strict=True):
                if (other.shape, other.dtype) != (leaf.shape, leaf.dtype):
                    raise Refused(
                        f"inputs[{i}] leaf {path!r} is {other.dtype}{list(other.shape)}, in inputs[0] it is "
                        f"{leaf.dtype}{list(leaf.shape)}; all examples need the same: pad or crop in inputs="
                    )
                array[i - start] = other

        with ThreadPoolExecutor(READ_THREADS) as pool:
            for _ in pool.map(fill, range(start, stop)):
                pass
        return jax.tree_util.tree_unflatten(treedef, arrays)


def numeric(leaf: Any, what: str) -> np.ndarray:
    """`leaf` as a NumPy array of a type that JAX takes, or Refused."""
    if np.ma.isMaskedArray(leaf):
        raise Refused(f"{what} is a masked array, whose mask would be lost; fill it; change inputs=")
    array = np.asarray(leaf)
    if not (jnp.issubdtype(array.dtype, np.number) or array.dtype == np.bool_):
        raise Refused(f"{what} is a {kind_of(leaf)} of type {array.dtype}; allowed are numbers; change inputs=")
    return native(array)

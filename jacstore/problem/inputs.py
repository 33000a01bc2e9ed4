"""Read runs of examples from sliceable arrays or a map-style dataset, as pytrees of NumPy arrays `(n, ...)`."""

from __future__ import annotations

import itertools
import math
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jacstore.base.machine import format_size
from jacstore.base.threads import Pool, settings_in_force, within_settings
from jacstore.errors import InvalidRequestError
from jacstore.problem.pytrees import native, paths_and_leaves
from jacstore.problem.user_errors import kind_of, reraise_user_error

READ_THREADS = 8


def is_dataset(inputs: Any) -> bool:
    """Whether `inputs` is one map-style dataset and not a pytree of arrays; containers have more than a leaf's tree."""
    is_leaf = jax.tree_util.all_leaves([inputs])
    items = hasattr(inputs, "__len__") and hasattr(inputs, "__getitem__")
    return is_leaf and items and (is_table(inputs) or not hasattr(inputs, "shape"))


def is_table(inputs: Any) -> bool:
    """Whether `inputs` is a dataset of named columns as those of Hugging Face are, whose shape is not an array's."""
    return hasattr(inputs, "column_names") and callable(getattr(inputs, "with_format", None))


class Examples(Protocol):
    """N examples, and any run of them."""

    n_examples: int

    def read(self, start: int, stop: int) -> Any: ...

    def bytes_held(self) -> tuple[int, int]:
        """Bytes of one example, and of the chunks that reading examples in order holds."""
        ...


class Range:
    """Examples `first` to `last - 1` of others."""

    def __init__(self, examples: Examples, first: int, last: int) -> None:
        self.examples, self.first, self.n_examples = examples, first, last - first

    def read(self, start: int, stop: int) -> Any:
        """Examples `start` to `stop - 1` of the range."""
        return self.examples.read(self.first + start, self.first + stop)

    def bytes_held(self) -> tuple[int, int]:
        """As of all examples."""
        return self.examples.bytes_held()


class Arrays:
    """Examples held as a pytree of sliceable arrays.

    Raises
    ------
    InvalidRequestError
        If a leaf has no first axis, or leaves differ in its length.
    """

    def __init__(self, inputs: Any) -> None:
        with reraise_user_error("inputs is not a pytree:", "change inputs="):
            named = paths_and_leaves(inputs)
        if not named:
            raise InvalidRequestError(
                "inputs holds no array; it has to be a pytree of arrays (N, ...) or a dataset; change inputs="
            )
        for path, leaf in named:
            if not getattr(leaf, "shape", ()):
                raise InvalidRequestError(
                    f"inputs leaf {path!r} is a {kind_of(leaf)} without a first axis; every leaf has to be an array "
                    "(N, ...); change inputs="
                )
        lengths = {path: leaf.shape[0] for path, leaf in named}
        unknown = [path for path, length in lengths.items() if math.isnan(length)]
        if unknown:
            raise InvalidRequestError(
                f"inputs leaf {unknown[0]!r} does not know its length; it has to be a number; "
                "call compute_chunk_sizes() on the Dask array of inputs="
            )
        if len(set(lengths.values())) > 1:
            given = ", ".join(f"{path!r}: {length}" for path, length in lengths.items())
            raise InvalidRequestError(
                f"inputs leaves have different lengths ({given}); all need the N examples along their first "
                "axis; change inputs="
            )
        self.named = named
        # The chunk of each leaf that the next examples are in: its first example, and its numbers.
        self._chunks: dict[str, tuple[int, np.ndarray]] = {}
        self.treedef = jax.tree_util.tree_structure(inputs)
        self.n_examples = int(next(iter(lengths.values())))

    def read(self, start: int, stop: int) -> Any:
        """Examples `start` to `stop - 1`."""
        arrays = []
        for path, leaf in self.named:
            with reraise_user_error(f"inputs leaf {path!r} raised at examples {start}:{stop}", "change inputs="):
                array = self._by_chunks(path, leaf, start, stop)
            if array.shape[:1] != (stop - start,):
                raise InvalidRequestError(
                    f"inputs leaf {path!r} gave shape {array.shape} for examples {start}:{stop}; the first axis "
                    f"has to be {stop - start}; change inputs="
                )
            arrays.append(array)
        return jax.tree_util.tree_unflatten(self.treedef, arrays)

    def bytes_held(self) -> tuple[int, int]:
        """Bytes of one example, and of what reading holds beside it: a chunk of each leaf, and the memory to decode it.

        Zarr holds a chunk as it is stored, as it is decoded, and as it is returned.
        """
        each = sum(_example_bytes(leaf) for _, leaf in self.named)
        chunks = [_example_bytes(leaf) * _chunk_length(leaf) for _, leaf in self.named]
        return each, sum(chunks) + 2 * max(chunks)

    def _by_chunks(self, path: str, leaf: Any, start: int, stop: int) -> np.ndarray:
        """Examples of one leaf, chunk by chunk, so that few chunks are in memory and each is decoded once."""
        length, what = _chunk_length(leaf), f"inputs leaf {path!r}"
        if not length:
            return numeric(leaf[start:stop], what)
        borders = [start, *range((start // length + 1) * length, stop, length), stop]
        parts = [self._of_chunk(path, leaf, a, b, a // length * length, length) for a, b in itertools.pairwise(borders)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _of_chunk(self, path: str, leaf: Any, start: int, stop: int, first: int, length: int) -> np.ndarray:
        """Examples that are all in one chunk, which is kept while more of its examples may be asked for."""
        last, what = min(first + length, self.n_examples), f"inputs leaf {path!r}"
        kept = self._chunks.get(path)
        if kept is None or kept[0] != first:
            self._chunks.pop(path, None)
            if (start, stop) == (first, last):
                return numeric(leaf[start:stop], what)
            kept = (first, numeric(leaf[first:last], what))
            if kept[1].shape[:1] != (last - first,):
                return kept[1]
            self._chunks[path] = kept
        if stop == last:
            self._chunks.pop(path, None)
        # A copy: a view would keep the whole chunk alive as long as the batch.
        return kept[1][start - first : stop - first].copy()


def examples_at_once(sizes: tuple[int, int], room: int, most: int) -> int:
    """How many examples may be read at once, at most `most`.

    Parameters
    ----------
    sizes
        Bytes of one example and of what is held beside the examples, as `bytes_held` says.
    room
        Bytes for them: for a batch that is used, one that is read, and what is held beside.

    Raises
    ------
    InvalidRequestError
        If there is no room for one.
    """
    each, beside = sizes
    needed = beside + 2 * each
    if needed > room:
        raise InvalidRequestError(
            f"--memory: reading one example takes {format_size(needed)}, whole chunks of inputs= included; "
            f"{format_size(max(0, room))} may be used for it; give more (memory=), or inputs= in smaller chunks"
        )
    return min(most, (room - beside) // max(1, 2 * each))


def _example_bytes(leaf: Any) -> int:
    return math.prod(leaf.shape[1:]) * int(getattr(getattr(leaf, "dtype", None), "itemsize", 8))


def _chunk_length(leaf: Any) -> int:
    """Examples of the largest chunk of a Zarr, h5py or Dask array; 0 for what is in memory or has none."""
    chunks = getattr(leaf, "chunks", None)
    if not isinstance(chunks, tuple) or not chunks:
        return 0
    return int(max(chunks[0], default=0) if isinstance(chunks[0], tuple) else chunks[0])


class Dataset:
    """Examples held as one map-style dataset."""

    def __init__(self, items: Any) -> None:
        if is_table(items):
            with reraise_user_error("inputs.with_format('numpy') raised", "change inputs="):
                items = items.with_format("numpy")
        self.items = items
        with reraise_user_error("len(inputs) raised", "change inputs="):
            self.n_examples = len(items)

    @cached_property
    def first(self) -> tuple[list[tuple[str, np.ndarray]], Any]:
        """Item 0, whose structure, shapes and types all other items must share."""
        # All others are read as this one was, whatever holds where they are read.
        self._settings = settings_in_force()
        return self.item(0)

    def item(self, i: int) -> tuple[list[tuple[str, np.ndarray]], Any]:
        """Paths and leaves of item i, and its structure."""
        with reraise_user_error(f"inputs[{i}] raised", "change the dataset given as inputs="):
            item = self.items[i]
            named = [(path, numeric(leaf, f"inputs[{i}] leaf {path!r}")) for path, leaf in paths_and_leaves(item)]
            return named, jax.tree_util.tree_structure(item)

    def bytes_held(self) -> tuple[int, int]:
        """Bytes of one example, and of those that threads hold beside it."""
        each = sum(leaf.nbytes for _, leaf in self.first[0])
        return each, READ_THREADS * each

    def read(self, start: int, stop: int) -> Any:
        """Examples `start` to `stop - 1`, each fetched by one of `READ_THREADS` threads."""
        named, treedef = self.first
        arrays = [np.empty((stop - start, *leaf.shape), leaf.dtype) for _, leaf in named]

        def fill(i: int) -> None:
            others, other_treedef = self.item(i)
            if other_treedef != treedef:
                raise InvalidRequestError(
                    f"inputs[{i}] has the structure {other_treedef}, inputs[0] {treedef}; all examples need the "
                    "same; change inputs="
                )
            for array, (path, leaf), (_, other) in zip(arrays, named, others, strict=True):
                if (other.shape, other.dtype) != (leaf.shape, leaf.dtype):
                    raise InvalidRequestError(
                        f"inputs[{i}] leaf {path!r} is {other.dtype}{list(other.shape)}, in inputs[0] it is "
                        f"{leaf.dtype}{list(leaf.shape)}; all examples need the same: pad or crop in inputs="
                    )
                array[i - start] = other

        with Pool(READ_THREADS) as pool:
            for _ in pool.map(within_settings(self._settings, fill), range(start, stop)):
                pass
        return jax.tree_util.tree_unflatten(treedef, arrays)


def numeric(leaf: Any, what: str) -> np.ndarray:
    """`leaf` as a NumPy array of a type that JAX takes, or InvalidRequestError."""
    if np.ma.isMaskedArray(leaf):
        raise InvalidRequestError(f"{what} is a masked array, whose mask would be lost; fill it; change inputs=")
    array = np.asarray(leaf)
    if not (jnp.issubdtype(array.dtype, np.number) or array.dtype == np.bool_):
        raise InvalidRequestError(
            f"{what} is a {kind_of(leaf)} of type {array.dtype}; allowed are numbers; change inputs="
        )
    return native(array)

"""In: a user's function, parameters and data. Out: a probed, fingerprinted `function(selected, rest, example) -> (K,)`.

`Problem` holds what the user gave and reads examples. `prepare` splits the parameters into the leaves that a Jacobian
is taken for and the rest, traces the function, probes that it is a function of one example, and hashes all of it.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import re
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jacstore.errors import JacstoreError, ProbeFailed, Refused

READ_THREADS = 8
PATHS_SHOWN = 5
MESSAGE_LENGTH = 300


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A function, its parameters and the examples it is differentiated at.

    Parameters
    ----------
    apply
        `apply(params, example)` sees one example without a batch axis and returns a pytree of floating outputs.
    params
        Pytree of parameters.
    inputs
        Pytree whose leaves can be sliced along a common first axis of N examples (NumPy, JAX, memmap, Zarr, h5py,
        Dask), or one map-style dataset: `len(inputs)` examples, `inputs[i]` a pytree.
    batched
        `apply` insists on a batch axis; it is called with batches of one example.
    outputs
        `"all"`, `"sum"` (gradient of the summed outputs), or indices into the flattened outputs.
    select
        Regular expression (searched for) or predicate on a leaf's path; None selects every floating leaf.

    Raises
    ------
    Refused
        If a field cannot be what it has to be. No data is read here.
    """

    apply: Callable[[Any, Any], Any]
    params: Any = field(repr=False)
    inputs: Any = field(repr=False)
    batched: bool = False
    outputs: str | Sequence[int] = "all"
    select: str | Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        if not callable(self.apply):
            raise Refused(
                f"apply is a {_kind(self.apply)}; it has to be a function of (params, example); change apply="
            )
        if not isinstance(self.batched, bool):
            raise Refused(f"batched is {self.batched!r}; allowed are True and False; change batched=")
        object.__setattr__(self, "outputs", _checked_outputs(self.outputs))
        _check_select(self.select)
        _ = self.n_examples

    @cached_property
    def _source(self) -> _Arrays | _Dataset:
        return _Dataset(self.inputs) if _is_dataset(self.inputs) else _Arrays(self.inputs)

    @property
    def n_examples(self) -> int:
        """N, the number of examples."""
        return self._source.n_examples

    def read(self, start: int, stop: int) -> Any:
        """Read examples `start` to `stop - 1` as a pytree of NumPy arrays `(stop - start, ...)`.

        Raises
        ------
        Refused
            If the range is not inside `[0, N]`, or the user's data cannot be read or is ragged.
        """
        if not 0 <= start <= stop <= self.n_examples:
            raise Refused(f"examples {start}:{stop} were asked for; there are {self.n_examples}; change the range")
        return self._source.read(start, stop)


def _checked_outputs(outputs: Any) -> str | tuple[int, ...]:
    allowed = 'allowed are "all", "sum" or a list of different indices from 0; change outputs='
    if isinstance(outputs, str):
        if outputs not in ("all", "sum"):
            raise Refused(f"outputs is {outputs!r}; {allowed}")
        return outputs
    try:
        chosen = tuple(outputs)
        if any(isinstance(k, (bool, np.bool_)) for k in chosen):
            raise TypeError("a mask, not indices")
        chosen = tuple(index(k) for k in chosen)
    except TypeError as error:
        raise Refused(f"outputs is {outputs!r} ({error}); {allowed}") from error
    repeated = sorted(k for k, count in Counter(chosen).items() if count > 1)
    if repeated:
        raise Refused(f"outputs names {repeated[0]} twice; {allowed}")
    if not chosen or min(chosen) < 0:
        raise Refused(f"outputs is {list(chosen)}; {allowed}")
    return chosen


def _check_select(select: Any) -> None:
    if select is None or callable(select):
        return
    if not isinstance(select, str):
        raise Refused(
            f"select is a {_kind(select)}; allowed are a regular expression, a predicate on the path, or None; "
            "change select="
        )
    try:
        re.compile(select)
    except re.error as error:
        raise Refused(f"select {select!r} is not a regular expression: {error}; change select=") from error


# --- reading examples -------------------------------------------------------------------------------------------------


def _is_dataset(inputs: Any) -> bool:
    """Whether `inputs` is one map-style dataset and not a pytree of arrays; containers have more than a leaf's tree."""
    is_leaf = jax.tree_util.all_leaves([inputs])
    return is_leaf and not hasattr(inputs, "shape") and hasattr(inputs, "__len__") and hasattr(inputs, "__getitem__")


class _Arrays:
    """Examples held as a pytree of sliceable arrays."""

    def __init__(self, inputs: Any) -> None:
        with _naming("inputs is not a pytree:", "change inputs="):
            named = paths_and_leaves(inputs)
        if not named:
            raise Refused(
                "inputs holds no array; it has to be a pytree of arrays (N, ...) or a dataset; change inputs="
            )
        for path, leaf in named:
            if not getattr(leaf, "shape", ()):
                raise Refused(
                    f"inputs leaf {path!r} is a {_kind(leaf)} without a first axis; every leaf has to be an array "
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
        arrays = []
        for path, leaf in self.named:
            with _naming(f"inputs leaf {path!r} raised at examples {start}:{stop}", "change inputs="):
                array = _numeric(leaf[start:stop], f"inputs leaf {path!r}")
            if array.shape[:1] != (stop - start,):
                raise Refused(
                    f"inputs leaf {path!r} gave shape {array.shape} for examples {start}:{stop}; the first axis "
                    f"has to be {stop - start}; change inputs="
                )
            arrays.append(array)
        return jax.tree_util.tree_unflatten(self.treedef, arrays)


class _Dataset:
    """Examples held as one map-style dataset."""

    def __init__(self, items: Any) -> None:
        self.items = items
        with _naming("len(inputs) raised", "change inputs="):
            self.n_examples = len(items)

    @cached_property
    def first(self) -> tuple[list[tuple[str, np.ndarray]], Any]:
        """Item 0, whose structure, shapes and types all others have to share."""
        return self.item(0)

    def item(self, i: int) -> tuple[list[tuple[str, np.ndarray]], Any]:
        with _naming(f"inputs[{i}] raised", "change the dataset given as inputs="):
            item = self.items[i]
            named = [(path, _numeric(leaf, f"inputs[{i}] leaf {path!r}")) for path, leaf in paths_and_leaves(item)]
            return named, jax.tree_util.tree_structure(item)

    def read(self, start: int, stop: int) -> Any:
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


def _numeric(leaf: Any, what: str) -> np.ndarray:
    """`leaf` as a NumPy array of a type that JAX takes, or Refused."""
    array = np.asarray(leaf)
    if not (jnp.issubdtype(array.dtype, np.number) or array.dtype == np.bool_):
        raise Refused(f"{what} is a {_kind(leaf)} of type {array.dtype}; allowed are numbers; change inputs=")
    return _native(array)


def _native(array: np.ndarray) -> np.ndarray:
    """The same numbers in this machine's byte order, and long doubles as float64: JAX takes no other."""
    if array.dtype == np.longdouble:
        return array.astype(np.float64)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


# --- paths and messages -----------------------------------------------------------------------------------------------


def paths_and_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Flatten `tree` to (path, leaf): keys joined by `/`, each percent-encoded; a bare leaf has the path `.`."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [("/".join(_component(entry) for entry in keys) if keys else ".", leaf) for keys, leaf in flat]


def _component(entry: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            entry = getattr(entry, name)
            break
    return str(entry).replace("%", "%25").replace("/", "%2F")


def _kind(value: Any) -> str:
    return type(value).__name__


@contextmanager
def _naming(what: str, change: str) -> Iterator[None]:
    """Turn an exception of the user's code into one line: what failed, the exception and its place, what to change."""
    try:
        yield
    except JacstoreError:
        raise
    except Exception as error:
        raise Refused(f"{what} {one_line(error)}; {change}") from error


def one_line(error: BaseException) -> str:
    """`Type: message (file:line)`, the place being the innermost line of the user's own code, if there is one."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    text = " ".join(text.split())
    text = text if len(text) <= MESSAGE_LENGTH else text[: MESSAGE_LENGTH - 1] + "…"
    place = _place(error)
    return f"{_kind(error)}{': ' if text else ''}{text}{f' ({place})' if place else ''}"


def _place(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    tools = [str(Path(inspect.getfile(module)).parent) for module in (jax, np)]
    ours = [str(Path(__file__).parent), *tools]
    installed = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    standard = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]

    def under(frame: traceback.FrameSummary, folders: list[str]) -> bool:
        return any(frame.filename.startswith(folder + os.sep) for folder in folders)

    # Generated code (a dataclass's __init__) and frozen modules are no place that anyone can open.
    generated = ("<string>", "<frozen")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(generated)]
    frames = [frame for frame in frames if not under(frame, ours)]
    # site-packages lies inside the standard library's folder; a model that is installed there is better than nothing.
    users = [frame for frame in frames if not under(frame, installed + standard)]
    chosen = (users or [frame for frame in frames if under(frame, installed)])[-1:]
    return f"{chosen[0].filename}:{chosen[0].lineno}" if chosen else ""


# --- preparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SelectedLeaf:
    """One parameter array that the Jacobian has columns for."""

    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A problem ready to be differentiated.

    Attributes
    ----------
    n_examples, n_outputs
        N and K, the latter after the choice of outputs.
    leaves
        The selected leaves in the order of `jax.tree_util.tree_flatten`.
    left_out
        (path, reason) of every other leaf.
    selected, rest
        Arrays of the selected leaves and of the others; what is no array is closed over by `function`.
    function
        `function(selected, rest, example) -> (K,)`, traceable; call it inside `precision_context`.
    read
        `read(start, stop)`: as `Problem.read`, in the types that are computed in.
    requested
        Fields that decide the result, for the fingerprint; JSON-able.
    """

    n_examples: int
    n_outputs: int
    leaves: tuple[SelectedLeaf, ...]
    left_out: tuple[tuple[str, str], ...]
    selected: list[Any]
    rest: list[Any]
    function: Callable[[list[Any], list[Any], Any], jax.Array]
    read: Callable[[int, int], Any]
    requested: dict[str, Any]


@contextmanager
def precision_context(float64: bool) -> Iterator[None]:
    """Compute products in full precision, and in 64-bit types if `float64`; holds for the calling thread only.

    Without `float64` the user's own setting of 64-bit types stays: that is the parameters' own precision.
    """
    with jax.enable_x64(True) if float64 else nullcontext(), jax.default_matmul_precision("highest"):
        yield


def prepare(problem: Problem, *, float64: bool = False) -> Prepared:
    """Split, trace, probe and fingerprint `problem`; with `float64` parameters and inputs are upcast.

    Raises
    ------
    Refused
        If there is nothing to compute, or `apply` fails or cannot be differentiated.
    ProbeFailed
        If the outputs are not finite, change from call to call, or depend on other examples of the batch.
    """
    if problem.n_examples == 0:
        raise Refused("inputs holds 0 examples; at least 1 is needed; change inputs=")
    with precision_context(float64):
        parameters = _split(problem.params, problem.select, float64)

        def read(start: int, stop: int) -> Any:
            with precision_context(float64):
                return jax.tree_util.tree_map(lambda leaf: _computed(leaf, float64), problem.read(start, stop))

        first = problem.read(0, 1)
        example = jax.tree_util.tree_map(lambda leaf: _computed(leaf, float64)[0], first)
        all_outputs = _flat_function(problem, parameters)
        n_all = _count_outputs(all_outputs, parameters, example)
        if isinstance(problem.outputs, tuple) and max(problem.outputs) >= n_all:
            raise Refused(
                f"outputs names index {max(problem.outputs)}; apply has {n_all} outputs, 0 to {n_all - 1}; "
                "change outputs="
            )
        _probe(problem, parameters, all_outputs, example)

        def function(selected: list[Any], rest: list[Any], example: Any) -> jax.Array:
            return _chosen(all_outputs(selected, rest, example), problem.outputs)

        return Prepared(
            n_examples=problem.n_examples,
            n_outputs=_count_chosen(n_all, problem.outputs),
            leaves=parameters.leaves,
            left_out=parameters.left_out,
            selected=parameters.selected,
            rest=parameters.rest,
            function=function,
            read=read,
            requested=_requested(problem, parameters, first, _derivative(parameters, all_outputs, example)),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Parameters:
    """The leaves of params in tree order, each `selected`, `rest`, or `fixed` (no array: closed over)."""

    treedef: Any
    roles: tuple[str, ...]
    selected: list[Any]
    rest: list[Any]
    fixed: list[Any]
    leaves: tuple[SelectedLeaf, ...]
    left_out: tuple[tuple[str, str], ...]

    def join(self, selected: list[Any], rest: list[Any]) -> Any:
        """The pytree that `apply` expects."""
        streams = {"selected": iter(selected), "rest": iter(rest), "fixed": iter(self.fixed)}
        return jax.tree_util.tree_unflatten(self.treedef, [next(streams[role]) for role in self.roles])


def _split(params: Any, select: str | Callable[[str], bool] | None, float64: bool) -> _Parameters:
    with _naming("params is not a pytree:", "change params="):
        named = paths_and_leaves(params)
    repeated = [path for path, count in Counter(path for path, _ in named).items() if count > 1]
    if repeated:
        raise Refused(f"params has two leaves with path {repeated[0]!r}; paths have to differ; rename one in params=")
    types = {path: _dtype(leaf) for path, leaf in named}
    for path, dtype in types.items():
        if _is(dtype, np.complexfloating):
            raise Refused(
                f"params leaf {path!r} is {dtype}; leaves have to be real; hold its real and imaginary parts as two "
                "leaves of params=, or close over it"
            )
    floating = [path for path, dtype in types.items() if _is(dtype, np.floating)]
    if not floating:
        given = ", ".join(f"{path!r}: {_name(leaf)}" for path, leaf in named[:PATHS_SHOWN]) or "no leaf at all"
        raise Refused(f"params has no floating-point leaf ({given}); at least one is needed; change params=")
    chosen = _select(floating, select)

    groups: dict[str, list[Any]] = {"selected": [], "rest": [], "fixed": []}
    roles, leaves, left_out = [], [], []
    for path, leaf in named:
        role = "selected" if path in chosen else "fixed" if types[path] is None else "rest"
        value = leaf if role == "fixed" else _own(_computed(leaf, float64))
        roles.append(role)
        groups[role].append(value)
        if role == "selected":
            leaves.append(SelectedLeaf(path=path, shape=tuple(value.shape), dtype=str(value.dtype)))
        else:
            left_out.append((path, "not selected" if path in floating else f"not floating point ({_name(leaf)})"))
    return _Parameters(
        treedef=jax.tree_util.tree_structure(params),
        roles=tuple(roles),
        leaves=tuple(leaves),
        left_out=tuple(left_out),
        **groups,
    )


def _select(paths: list[str], select: str | Callable[[str], bool] | None) -> set[str]:
    if select is None:
        return set(paths)
    matches = select if callable(select) else re.compile(select).search
    with _naming("select raised", "change select="):
        chosen = {path for path in paths if matches(path)}
    if not chosen:
        given = repr(select) if isinstance(select, str) else "the predicate"
        shown = ", ".join(repr(path) for path in paths[:PATHS_SHOWN]) + (", …" if len(paths) > PATHS_SHOWN else "")
        raise Refused(f"select {given} matches no floating-point leaf; there are {shown}; change select=")
    return chosen


def _dtype(leaf: Any) -> Any:
    """The type of an array leaf; None for a leaf that is no array and is closed over.

    Python ints and bools are closed over: networks branch on them and use them as sizes, which no traced value allows.
    """
    if isinstance(leaf, jax.Array):
        return leaf.dtype
    if isinstance(leaf, (float, complex)) or (hasattr(leaf, "__array__") and not isinstance(leaf, type)):
        dtype = np.asarray(leaf).dtype
        return dtype if jnp.issubdtype(dtype, np.number) or dtype == np.bool_ else None
    return None


def _is(dtype: Any, kind: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, kind)  # NumPy takes None for float64


def _name(leaf: Any) -> str:
    return _kind(leaf) if _dtype(leaf) is None else str(_dtype(leaf))


def _computed(leaf: Any, float64: bool) -> Any:
    """`leaf` in the type that JAX computes in: float64 on request, else as its 64-bit setting says."""
    if isinstance(leaf, float) and not isinstance(leaf, np.generic):
        return jnp.asarray(leaf)  # stays weakly typed, as it is in the user's own calls
    if not isinstance(leaf, jax.Array):
        leaf = _native(np.asarray(leaf))
    elif jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    wide = float64 and jnp.issubdtype(leaf.dtype, np.floating)
    dtype = np.dtype(np.float64) if wide else jax.dtypes.canonicalize_dtype(leaf.dtype)
    with np.errstate(over="ignore"):  # too large for float32 becomes infinite, which the probe or the build reports
        return leaf if leaf.dtype == dtype else leaf.astype(dtype)


def _own(array: Any) -> jax.Array:
    """`array` in JAX's hands; a copy if it was NumPy's, whose memory JAX may share and the user may write to."""
    return array if isinstance(array, jax.Array) else jnp.asarray(array.copy())


# --- the function -----------------------------------------------------------------------------------------------------

Flat = Callable[[list[Any], list[Any], Any], jax.Array]


def _flat_function(problem: Problem, parameters: _Parameters) -> Flat:
    """All outputs of one example, `(selected, rest, example) -> (K,)`, before any are chosen."""

    def flat(selected: list[Any], rest: list[Any], example: Any) -> jax.Array:
        params = parameters.join(selected, rest)
        if not problem.batched:
            return _flatten(problem.apply(params, example))
        batch = jax.tree_util.tree_map(lambda leaf: jnp.expand_dims(leaf, 0), example)
        return _flatten(_first_of_batch(problem.apply(params, batch), 1))

    return flat


def _first_of_batch(outputs: Any, size: int) -> Any:
    for path, leaf in paths_and_leaves(outputs):
        shape = jnp.shape(leaf)
        if shape[:1] != (size,):
            raise Refused(
                f"apply returned output {path!r} of shape {shape} for a batch of {size}; with batched=True the first "
                f"axis has to be {size}; change apply= or batched="
            )
    return jax.tree_util.tree_map(lambda leaf: leaf[0], outputs)


def _flatten(outputs: Any) -> jax.Array:
    """A pytree of floating outputs as one vector `(K,)`, leaves in tree order."""
    parts = []
    for path, leaf in paths_and_leaves(outputs):
        dtype = _dtype(leaf)
        if not _is(dtype, np.floating):
            raise Refused(
                f"apply returned output {path!r} of type {_name(leaf)}; outputs have to be floating point; drop or "
                "convert it in apply="
            )
        parts.append(jnp.ravel(leaf))
    if not sum(part.size for part in parts):
        raise Refused("apply returned no outputs (K = 0); at least one is needed; change apply=")
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _chosen(flat: jax.Array, outputs: str | Sequence[int]) -> jax.Array:
    if outputs == "all":
        return flat
    if outputs == "sum":
        return jnp.sum(flat, keepdims=True)
    return flat.at[np.asarray(outputs)].get(mode="promise_in_bounds", unique_indices=True)


def _count_chosen(n_all: int, outputs: str | Sequence[int]) -> int:
    return n_all if outputs == "all" else 1 if outputs == "sum" else len(outputs)


def _calling(example: Any) -> Any:
    given = ", ".join(f"{path!r}: {leaf.dtype}{list(leaf.shape)}" for path, leaf in paths_and_leaves(example))
    return _naming(
        "apply raised",
        f"it gets params and one example ({given}), no batch axis; change apply=, or batched=True if it needs one",
    )


def _count_outputs(flat: Flat, parameters: _Parameters, example: Any) -> int:
    with _calling(example):
        return int(jax.eval_shape(flat, parameters.selected, parameters.rest, example).size)


# --- probes -----------------------------------------------------------------------------------------------------------


def _probe(problem: Problem, parameters: _Parameters, flat: Flat, example: Any) -> None:
    """Check on example 0 that outputs are finite, repeatable, and those of one example."""
    finite = all(_finite(leaf) for leaf in jax.tree_util.tree_leaves(example))
    # A non-finite example is the build's to report; with its holes filled the other two probes still mean something.
    example = jax.tree_util.tree_map(_filled, example)
    with _calling(example):
        once = _evaluate(flat, parameters, example)
        # A jit inside apply keeps what it traced, and with it the first call's noise: forget it.
        jax.clear_caches()
        again = _evaluate(flat, parameters, example)
    if finite and not _finite(once):
        k = int(np.argmin(np.isfinite(once.astype(np.float64))))
        named = zip(parameters.leaves, parameters.selected, strict=True)
        bad = [leaf.path for leaf, value in named if not _finite(value)]
        cause = f"params leaf {bad[0]!r} is not finite either" if bad else "its input is finite"
        raise ProbeFailed(
            f"output {k} of example 0 is {once[k]}, {cause}; outputs have to be finite; change apply= or params="
        )
    if not _same_call(once, again):
        raise ProbeFailed(
            "outputs change from call to call (dropout? noise?); they have to depend on params and example alone; "
            "switch it off (eval mode) or close over a fixed random key in apply="
        )
    if problem.batched:
        _probe_batch(problem, parameters, example, once)


def _evaluate(flat: Flat, parameters: _Parameters, example: Any) -> np.ndarray:
    def anew(selected: list[Any], rest: list[Any], example: Any) -> jax.Array:
        return flat(selected, rest, example)

    # jit caches by function: one that is new is traced anew.
    return np.asarray(jax.jit(anew)(parameters.selected, parameters.rest, example))


def _probe_batch(problem: Problem, parameters: _Parameters, example: Any, alone: np.ndarray) -> None:
    """Compare example 0 alone with example 0 beside another one; beside itself would hide BatchNorm."""
    batch = jax.tree_util.tree_map(lambda leaf: np.stack([leaf, _perturbed(np.asarray(leaf))]), example)

    def flat(selected: list[Any], rest: list[Any], batch: Any) -> jax.Array:
        return _flatten(_first_of_batch(problem.apply(parameters.join(selected, rest), batch), 2))

    with _calling(example):
        beside = _evaluate(flat, parameters, batch)
    if not (alone.shape == beside.shape and _close(alone, beside)):
        raise ProbeFailed(
            "outputs depend on the other examples of the batch (BatchNorm in training mode?); they have to depend on "
            "one example; use eval mode, or close over the statistics in apply="
        )


def _finite(array: Any) -> bool:
    array = np.asarray(array)
    return not jnp.issubdtype(array.dtype, np.floating) or bool(np.isfinite(array.astype(np.float64)).all())


def _filled(leaf: np.ndarray) -> np.ndarray:
    return leaf if _finite(leaf) else np.where(np.isfinite(leaf.astype(np.float64)), leaf, 0).astype(leaf.dtype)


def _same_call(once: np.ndarray, again: np.ndarray) -> bool:
    """Equal to the bit on a CPU; accelerators add scattered values in any order, so there up to rounding."""
    if once.tobytes() == again.tobytes():
        return True
    return jax.default_backend() != "cpu" and _close(once, again)


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether `‖a - b‖ <= sqrt(eps) ‖a‖` (3e-4 in float32).

    Products over a batch of two may add in another order than over one, an error of some eps; a coupling of examples
    moves the outputs by about their own size, because the perturbation does so to the inputs.
    """
    tolerance = float(jnp.finfo(a.dtype).eps) ** 0.5
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return bool(np.array_equal(a, b, equal_nan=True))
    return bool(np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(a), np.linalg.norm(b)))


def _perturbed(leaf: np.ndarray) -> np.ndarray:
    """Another example of the same kind: far away if floating, of values that occur if integer (they may be indices)."""
    if jnp.issubdtype(leaf.dtype, np.inexact):
        with np.errstate(over="ignore"):
            return (1 + 2 * leaf).astype(leaf.dtype)
    if leaf.dtype == np.bool_:
        return ~leaf
    flipped = np.flip(leaf)
    return flipped if (flipped != leaf).any() else np.where(leaf > 0, leaf - 1, leaf + 1).astype(leaf.dtype)


# --- fingerprint ------------------------------------------------------------------------------------------------------


def _requested(problem: Problem, parameters: _Parameters, first: Any, jaxpr: ClosedJaxpr) -> dict[str, Any]:
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", str(jaxpr))
    return {
        "parameters": _hash_parameters(problem.params),
        "function": hashlib.sha256(text.encode()).hexdigest(),
        "constants": _hash_constants(jaxpr),
        "outputs": problem.outputs if isinstance(problem.outputs, str) else list(problem.outputs),
        "selection": [leaf.path for leaf in parameters.leaves],
        "inputs": [[path, list(leaf.shape[1:]), str(leaf.dtype)] for path, leaf in paths_and_leaves(first)],
        "examples": problem.n_examples,
    }


def _derivative(parameters: _Parameters, flat: Flat, example: Any) -> ClosedJaxpr:
    """Outputs and VJP of one example as a jaxpr, so that custom derivative rules are inside.

    Its arguments are the parameters in tree order whatever is selected: another selection is the same function.
    """
    streams = {"selected": iter(parameters.selected), "rest": iter(parameters.rest)}
    roles = [role for role in parameters.roles if role != "fixed"]
    arrays = [next(streams[role]) for role in roles]

    def trace(moving: list[int]) -> ClosedJaxpr:
        def value_and_vjp(arrays: list[Any], example: Any) -> Any:
            def outputs(moved: list[Any]) -> jax.Array:
                whole = dict(enumerate(arrays)) | dict(zip(moving, moved, strict=True))
                groups = [[whole[i] for i, role in enumerate(roles) if role == kind] for kind in ("selected", "rest")]
                return flat(groups[0], groups[1], example)

            value, pull = jax.vjp(outputs, [arrays[i] for i in moving])
            return value, pull(jnp.ones_like(value))

        return jax.make_jaxpr(value_and_vjp)(arrays, example)

    floating = [i for i, array in enumerate(arrays) if jnp.issubdtype(array.dtype, np.floating)]
    selected = [i for i, role in enumerate(roles) if role == "selected"]
    if floating != selected:
        # What is left out may be without a derivative (a frozen backbone in a callback): then the selected ones do.
        with suppress(Exception):
            return trace(floating)
    with _naming("apply cannot be differentiated:", "change apply=, or leave the leaf out by select="):
        return trace(selected)


def _hash_parameters(params: Any) -> str:
    digest = hashlib.sha256()
    for path, leaf in paths_and_leaves(params):
        digest.update(f"{path}\n".encode())
        if _dtype(leaf) is not None:
            _update(digest, leaf)
        else:
            # The address in the text of a function is another one in the next process.
            plain = leaf is None or isinstance(leaf, (str, bytes, int))
            name = getattr(leaf, "__qualname__", type(leaf).__qualname__)
            digest.update(f"{_kind(leaf)} {leaf if plain else name}\n".encode())
    return digest.hexdigest()


def _update(digest: Any, leaf: Any) -> None:
    """Add type, shape and bytes of an array."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    digest.update(f"{array.dtype.name} {array.shape}\n".encode())
    digest.update(np.ascontiguousarray(_native(array)).reshape(-1).view(np.uint8))


def _hash_constants(jaxpr: ClosedJaxpr) -> str:
    """Hash the arrays that a jaxpr closes over, wherever they hang."""
    known: dict[int, bytes] = {}  # of each inner jaxpr, which may be shared by many equations

    def hash_of(value: Any) -> bytes:
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            if id(value) not in known:
                known[id(value)] = b"".join(hash_of(part) for part in _parts(value))
            inner = known[id(value)]
            return hashlib.sha256(inner).digest() if inner else b""
        if isinstance(value, (dict, list, tuple)):
            return b"".join(hash_of(part) for part in (value.values() if isinstance(value, dict) else value))
        if not hasattr(value, "__array__") or isinstance(value, type):
            return b""
        array = hashlib.sha256()
        _update(array, value)
        return array.digest()

    return hashlib.sha256(hash_of(jaxpr)).hexdigest()


def _parts(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[Any]:
    """What may hold arrays in a jaxpr; newer JAX has one class for closed and open ones."""
    yield from getattr(jaxpr, "consts", ())
    body = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in body.eqns:
        yield from _literal_arrays(equation.invars)
        yield from (equation.params[name] for name in sorted(equation.params))
    yield from _literal_arrays(body.outvars)


def _literal_arrays(variables: Sequence[Any]) -> Iterator[Any]:
    """Array-valued literals; the text of a jaxpr holds the values of scalar ones and counts as the function's."""
    return (variable.val for variable in variables if isinstance(variable, Literal) and np.ndim(variable.val))

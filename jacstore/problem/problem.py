"""The public `Problem`, and its preparation: a probed, fingerprinted `function(selected, rest, example) -> (K,)`.

`Problem` holds the user's function, parameters and data, and reads examples. `prepare` splits the parameters into the
leaves that the Jacobian has columns for and the rest, traces the function, probes that it is a function of one example,
and hashes everything that decides the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jacstore.base.devices import device
from jacstore.errors import InvalidRequestError
from jacstore.problem.fingerprint import (
    backward,
    by_text_of_jax,
    derivative,
    exact_hash,
    hash_function,
    hash_text_of_jax,
    lowest_precision,
    requested,
)
from jacstore.problem.inputs import Arrays, Dataset, is_dataset
from jacstore.problem.outputs import checked_outputs, chosen, count_chosen, flat_function, traced_outputs
from jacstore.problem.parameters import Parameters, SelectedLeaf, check_select, split_parameters
from jacstore.problem.probes import outputs_of, probe, probe_upcast
from jacstore.problem.program import (
    KeptProgram,
    Recent,
    kept_outputs,
    kept_programs,
    primitives,
    setting_of_jax,
    traced_anew,
)
from jacstore.problem.pytrees import computed
from jacstore.problem.twofold import gains
from jacstore.problem.user_errors import kind_of


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
    InvalidRequestError
        If a field has the wrong type or value. No data is read here.
    """

    apply: Callable[[Any, Any], Any]
    params: Any = field(repr=False)
    inputs: Any = field(repr=False)
    batched: bool = False
    outputs: str | Sequence[int] = "all"
    select: str | Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        if not callable(self.apply):
            raise InvalidRequestError(
                f"apply is a {kind_of(self.apply)}; it has to be a function of (params, example); change apply="
            )
        if not isinstance(self.batched, bool):
            raise InvalidRequestError(f"batched is {self.batched!r}; allowed are True and False; change batched=")
        object.__setattr__(self, "outputs", checked_outputs(self.outputs))
        check_select(self.select)
        _ = self.n_examples

    @cached_property
    def _source(self) -> Arrays | Dataset:
        return Dataset(self.inputs) if is_dataset(self.inputs) else Arrays(self.inputs)

    def bytes_held(self) -> tuple[int, int]:
        """Bytes of one example as it is read, and of what reading holds beside the examples: whole chunks."""
        return self._source.bytes_held()

    @property
    def n_examples(self) -> int:
        """N, the number of examples."""
        return self._source.n_examples

    def read(self, start: int, stop: int) -> Any:
        """Read examples `start` to `stop - 1` as a pytree of NumPy arrays `(stop - start, ...)`.

        Raises
        ------
        InvalidRequestError
            If the range is not inside `[0, N]`, or the user's data cannot be read or is ragged.
        """
        if not 0 <= start <= stop <= self.n_examples:
            raise InvalidRequestError(
                f"examples {start}:{stop} were asked for; there are {self.n_examples}; change the range"
            )
        return self._source.read(start, stop)


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A problem ready to be differentiated.

    Attributes
    ----------
    n_examples, n_outputs
        N and K, the latter after the choice of outputs.
    outputs_dtype
        Their type.
    two_at_once
        Whether checks compute two copies of an example at once, which compiles faster.
    leaves
        The selected leaves in the order of `jax.tree_util.tree_flatten`.
    left_out
        (path, reason) of every other leaf.
    selected, rest
        Arrays of the selected leaves and of the others; `function` closes over leaves that are no arrays.
    function
        `function(selected, rest, example) -> (K,)`, traceable; call it inside `precision_context`.
    read
        `read(start, stop)`: as `Problem.read`, in the types used for computing.
    input_bytes
        Bytes of one example as it is read, and of what is held beside the examples while some are read.
    lowest
        The lowest precision in the function and its derivative, which bounds the accuracy of rows.
    requested
        Fields that decide the result, for the fingerprint; JSON-able.
    trace
        Traces the function and its derivative, whose hash is in `requested`.
    backward
        The backward program of one example, traced once, and what this process has made of it.
    """

    n_examples: int
    n_outputs: int
    outputs_dtype: Any
    two_at_once: bool
    leaves: tuple[SelectedLeaf, ...]
    left_out: tuple[tuple[str, str], ...]
    selected: list[Any]
    rest: list[Any]
    function: Callable[[list[Any], list[Any], Any], jax.Array]
    read: Callable[[int, int], Any]
    input_bytes: tuple[int, int]
    lowest: str
    requested: dict[str, Any]
    trace: Callable[[], Any] = field(repr=False)
    backward: Callable[[], KeptProgram] = field(repr=False)

    def requested_like(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """`requested` in the words of what a store holds, which an earlier version may have written."""
        if not by_text_of_jax(found.get("function")):
            return self.requested
        # That text depends on the state of JAX's caches, which were emptied before it was made.
        with traced_anew():
            return {**self.requested, "function": hash_text_of_jax(self.trace())}


@contextmanager
def precision_context(float64: bool) -> Iterator[None]:
    """Compute products in full precision, and in 64-bit types if `float64`; holds for the calling thread only.

    Without `float64` the user's own setting of 64-bit types stays: that is the parameters' own precision.
    """
    with jax.enable_x64(True) if float64 else nullcontext(), jax.default_matmul_precision("highest"):
        yield


@contextmanager
def own_code() -> Iterator[None]:
    """Promote shapes and types as NumPy does inside jacstore's own code, whatever the user has told JAX to refuse."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def prepare(problem: Problem, *, float64: bool = False) -> Prepared:
    """Split, trace, probe and fingerprint `problem`; with `float64` parameters and inputs are upcast.

    Raises
    ------
    InvalidRequestError
        If there is nothing to compute, or `apply` fails or cannot be differentiated.
    InvalidFunctionError
        If the outputs are not finite, change from call to call, or depend on other examples of the batch.
    """
    if problem.n_examples == 0:
        raise InvalidRequestError("inputs holds 0 examples; at least 1 is needed; change inputs=")
    wide_already = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    # A dataset's items come as the user's settings make them; what is computed in is decided below.
    first = problem.read(0, 1)
    with precision_context(float64):
        parameters = split_parameters(problem.params, problem.select, float64)

        def read(start: int, stop: int) -> Any:
            with precision_context(float64):
                return jax.tree_util.tree_map(lambda leaf: computed(leaf, float64), problem.read(start, stop))

        example = jax.tree_util.tree_map(lambda leaf: computed(leaf, float64)[0], first)
        all_outputs = flat_function(problem.apply, problem.batched, parameters)

        def function(selected: list[Any], rest: list[Any], example: Any) -> jax.Array:
            return chosen(all_outputs(selected, rest, example), problem.outputs)

        def trace() -> Any:
            with precision_context(float64):
                return derivative(all_outputs, parameters, example)

        shapes = _shapes(problem, parameters, example, float64)
        kept = _equal(shapes, function, parameters, example)
        if kept is None:
            kept = KeptProgram()
            traced, outputs = traced_outputs(all_outputs, parameters, example)
            count = count_chosen(int(outputs.size), problem.outputs)
            two_at_once = gains(primitives(traced))
        else:
            count, outputs, two_at_once = kept.facts.n_outputs, kept.facts.outputs, kept.facts.two_at_once
        batched_apply = problem.apply if problem.batched else None
        found = probe(all_outputs, parameters, example, batched_apply, two_at_once, kept.made)
        if float64 and not wide_already:
            probe_upcast(_as_given(problem, first, kept.made), found)
        if kept.facts is None or not parameters.all_selected:
            # Another derivative of leaves that are not selected is another function, of the same backward program.
            jaxpr = trace()
            facts = _Facts(
                n_outputs=count,
                outputs=outputs,
                two_at_once=two_at_once,
                lowest=lowest_precision(jaxpr),
                function=hash_function(jaxpr),
            )
            kept.facts = kept.facts or facts
        else:
            facts = kept.facts

        def traced_backward() -> KeptProgram:
            if kept.jaxpr is None:
                with precision_context(float64):
                    chosen_outputs = jax.ShapeDtypeStruct((count,), outputs.dtype)
                    kept.jaxpr = backward(function, parameters.selected, parameters.rest, example, chosen_outputs)
                _keep(shapes, kept)
            return kept

        return Prepared(
            n_examples=problem.n_examples,
            n_outputs=count,
            outputs_dtype=outputs.dtype,
            two_at_once=two_at_once,
            leaves=parameters.leaves,
            left_out=parameters.left_out,
            selected=parameters.selected,
            rest=parameters.rest,
            function=function,
            read=read,
            input_bytes=problem.bytes_held(),
            lowest=facts.lowest,
            trace=trace,
            backward=traced_backward,
            requested=requested(
                params=problem.params,
                function=facts.function,
                outputs=problem.outputs,
                selection=[leaf.path for leaf in parameters.leaves],
                first=first,
                n_examples=problem.n_examples,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What is known of a function from its program: no parameter and no example decides it."""

    n_outputs: int
    outputs: Any
    two_at_once: bool
    lowest: str
    function: Mapping[str, str]


def _shapes(problem: Problem, parameters: Parameters, example: Any, float64: bool) -> Any:
    """All that has to be equal, the program apart, where what was compiled before is used again."""

    def described(leaf: Any) -> Any:
        return jax.typeof(leaf), getattr(leaf, "sharding", None), getattr(leaf, "committed", None)

    leaves, tree = jax.tree_util.tree_flatten(example)
    groups = (parameters.selected, parameters.rest, leaves)
    return (
        setting_of_jax(),
        device(),
        (float64, problem.batched, problem.outputs, tree, parameters.roles),
        tuple(tuple(described(leaf) for leaf in group) for group in groups),
    )


def _equal(shapes: Any, function: Any, parameters: Parameters, example: Any) -> KeptProgram | None:
    """What was made of an equal program; the function is traced to know, and a jit inside it as well.

    Neither its name nor the object tells: it may close over what has changed since.
    """
    # Whatever is wrong with the function is said where it is traced and probed for the first time.
    with suppress(Exception):
        outputs = kept_outputs.get(shapes)
        if outputs is not None:
            with traced_anew():
                jaxpr = backward(function, parameters.selected, parameters.rest, example, outputs)
            digest = exact_hash(jaxpr)
            found: KeptProgram | None = kept_programs.get((shapes, digest))
            if found is not None and found.jaxpr is not None:
                # An array that it closes over may have been written to since it was kept.
                if digest == exact_hash(found.jaxpr):
                    return found
                kept_programs.drop((shapes, digest))
    return None


def _keep(shapes: Any, kept: KeptProgram) -> None:
    """Keep what is made of a program for the next build of an equal one."""
    assert kept.jaxpr is not None
    outputs, digest = kept.jaxpr.out_avals[0], exact_hash(kept.jaxpr)
    kept.digest = digest
    # What describes shapes may hold objects of the user's that cannot be compared.
    with suppress(Exception):
        if digest is not None:
            kept_outputs.keep(shapes, jax.ShapeDtypeStruct(outputs.shape, outputs.dtype))
            kept_programs.keep((shapes, digest), kept)


def _as_given(problem: Problem, first: Any, made: Recent) -> np.ndarray | None:
    """Outputs `(K,)` of the first example in the parameters' own precision."""
    with jax.enable_x64(False), precision_context(False):
        parameters = split_parameters(problem.params, problem.select, False)
        example = jax.tree_util.tree_map(lambda leaf: computed(leaf, False)[0], first)
        return outputs_of(flat_function(problem.apply, problem.batched, parameters), parameters, example, made)

"""J, the Hessian and the generalised Gauss-Newton matrix (GGN) of a problem as linear operators without a store.

JVP, VJP, HVP and GVP by automatic differentiation, a batch of examples and some columns at a time.

Products (JVP, VJP, HVP, GVP) are computed by automatic differentiation, a batch of examples and some columns at a time.
The loss is a sum over examples, `L(params) = sum_i loss(f(params, x_i), target_i)`; its GGN is `sum_i J_iᵀ H_i J_i`
with `H_i` the Hessian of `loss` in the outputs. One product with any number of columns reads the inputs once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse.linalg import LinearOperator

from jacstore.base import machine
from jacstore.base.budget import AUTODIFF, Budget
from jacstore.base.devices import device_memory, on_accelerator, where_from
from jacstore.base.limits import LIMITS
from jacstore.base.machine import format_size
from jacstore.base.options import parse_count
from jacstore.base.threads import Pool
from jacstore.errors import InvalidRequestError
from jacstore.operators.parameter_columns import ParameterColumns
from jacstore.operators.stored import real, real_number
from jacstore.problem.inputs import examples_at_once
from jacstore.problem.problem import Problem, precision_context, prepare
from jacstore.problem.pytrees import computed, is_kind
from jacstore.problem.user_errors import reraise_user_error

Loss = Callable[[Any, Any], Any]
LARGEST_BATCH = 256


def jacobian_operator(
    problem: Problem, *, memory: int | str | None = None, dtype: str = "float32", batch_size: int | None = None
) -> ProblemJacobian:
    """The Jacobian `(N * K, P)` of a problem as a linear operator: `J v` by JVP, `Jᵀ u` by VJP, nothing stored.

    Parameters
    ----------
    problem
        The function, its parameters and its inputs; outputs and leaves as it chooses them.
    memory
        Bytes to allocate on the host, such as "8GB"; half of what is available if not given.
    dtype
        "float64" computes in float64; "float32" keeps the parameters' own precision. Sums over batches are float64.
    batch_size
        Examples a program; chosen from the memory if not given.
    """
    return ProblemJacobian(_Programs(problem, None, None, memory, dtype, batch_size))


def ggn_operator(
    problem: Problem,
    loss: Loss,
    targets: Any = None,
    *,
    alpha: float = 0.0,
    memory: int | str | None = None,
    dtype: str = "float32",
    batch_size: int | None = None,
) -> CurvatureOperator:
    """The GGN `alpha I + sum_i J_iᵀ H_i J_i` `(P, P)` as a linear operator, by JVP and VJP (a GVP).

    Parameters
    ----------
    loss
        `loss(outputs, target)`, a scalar for one example; outputs `(K,)` flat, as the problem chooses them.
    targets
        Pytree of arrays with the N examples along their first axis; without it `target` is the example's number.
    alpha
        Prior precision, added to the diagonal.
    memory, dtype, batch_size
        As in `jacobian_operator`.
    """
    return CurvatureOperator(_Programs(problem, loss, targets, memory, dtype, batch_size), "gvp", alpha)


def hvp_operator(
    problem: Problem,
    loss: Loss,
    targets: Any = None,
    *,
    alpha: float = 0.0,
    memory: int | str | None = None,
    dtype: str = "float32",
    batch_size: int | None = None,
) -> CurvatureOperator:
    """The Hessian `alpha I + d²L / dparams²` `(P, P)` of the summed loss as a linear operator, by JVP of the gradient.

    Parameters as in `ggn_operator`. For outputs that are linear in the parameters it equals the GGN.
    """
    return CurvatureOperator(_Programs(problem, loss, targets, memory, dtype, batch_size), "hvp", alpha)


class ProblemJacobian(LinearOperator, ParameterColumns):
    """J `(N * K, P)` of a problem; see `jacstore.jacobian_operator`."""

    def __init__(self, programs: _Programs) -> None:
        self._programs, self.paths = programs, programs.paths
        prepared = programs.prepared
        super().__init__(np.dtype(np.float64), (prepared.n_examples * prepared.n_outputs, self.n_parameters))

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        return self._matmat(x.reshape(-1, 1)).reshape(-1)

    def _rmatvec(self, x: np.ndarray) -> np.ndarray:
        return self._rmatmat(x.reshape(-1, 1)).reshape(-1)

    def _matmat(self, x: np.ndarray) -> np.ndarray:
        return self._programs.jvp(real(x))

    def _rmatmat(self, x: np.ndarray) -> np.ndarray:
        return self._programs.summed("vjp", real(x))


class CurvatureOperator(LinearOperator, ParameterColumns):
    """A symmetric `(P, P)` operator of a problem and a loss; see `jacstore.ggn_operator` and `hvp_operator`."""

    def __init__(self, programs: _Programs, kind: str, alpha: float) -> None:
        self._programs, self.paths, self.kind = programs, programs.paths, kind
        self.alpha = real_number(alpha, "alpha")
        super().__init__(np.dtype(np.float64), (self.n_parameters, self.n_parameters))

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        return self._matmat(x.reshape(-1, 1)).reshape(-1)

    def _matmat(self, x: np.ndarray) -> np.ndarray:
        product = self._programs.summed(self.kind, real(x))
        if self.alpha:
            product += self.alpha * real(x).astype(np.float64, copy=False)
        return product

    def _adjoint(self) -> CurvatureOperator:
        return self


@dataclass(frozen=True, kw_only=True)
class _Compiled:
    """A program for batches of `batch` examples and blocks of `columns` columns."""

    run: Callable[..., Any]
    batch: int
    columns: int


class _Programs:
    """Compiled products of a problem, and the loops over batches and columns around them."""

    def __init__(
        self,
        problem: Problem,
        loss: Loss | None,
        targets: Any,
        memory: int | str | None,
        dtype: str,
        batch_size: int | None,
    ) -> None:
        if dtype not in ("float32", "float64"):
            raise InvalidRequestError(f"dtype {dtype!r}: allowed are float32 and float64 (dtype=)")
        self.float64 = dtype == "float64"
        self.budget = Budget(machine.default_memory(memory)).split(**AUTODIFF)
        # For columns, their product and inputs. An accelerator has memory of its own for programs.
        self.room = self.budget.total if on_accelerator() else self.budget["columns"]
        self.batch_size = parse_count(batch_size, "--batch-size")
        self.prepared = prepare(problem, float64=self.float64)
        ends = list(itertools.accumulate(int(np.prod(leaf.shape)) for leaf in self.prepared.leaves))
        self.paths = {
            leaf.path: (leaf.shape, slice(a, b))
            for leaf, a, b in zip(self.prepared.leaves, [0, *ends], ends, strict=False)
        }
        self.loss, self.targets = loss, self._checked_targets(targets)
        self._compiled: dict[tuple[str, int], _Compiled] = {}
        with precision_context(self.float64):
            self.parameters = jax.device_put((self.prepared.selected, self.prepared.rest))
        if loss is not None:
            self._check_loss(loss)

    def _checked_targets(self, targets: Any) -> Any:
        """Targets as arrays with N examples along their first axis."""
        if targets is None:
            return None
        n = self.prepared.n_examples
        found = jax.tree_util.tree_map(np.asarray, targets)
        bad = [leaf.shape for leaf in jax.tree_util.tree_leaves(found) if leaf.shape[:1] != (n,)]
        if bad:
            raise InvalidRequestError(
                f"targets: an array of shape {bad[0]}; the first axis has to be {n}, the examples (targets=)"
            )
        with precision_context(self.float64):
            return jax.tree_util.tree_map(lambda leaf: computed(leaf, self.float64), found)

    def _check_loss(self, loss: Loss) -> None:
        """Refuse a loss that is not a scalar function of one example's outputs and its target."""
        _, targets, _ = self._batch(0, 1, 1)
        outputs = jax.ShapeDtypeStruct((self.prepared.n_outputs,), self._dtype)
        change = "it gets outputs (K,) and one example's target; change loss= or targets="
        with precision_context(self.float64), reraise_user_error("loss raised", change):
            found = jax.eval_shape(loss, outputs, jax.tree_util.tree_map(lambda leaf: leaf[0], targets))
        if getattr(found, "shape", None) != () or not is_kind(found.dtype, np.floating):
            raise InvalidRequestError(
                f"loss returned {found}; it has to be a floating-point scalar for one example; change loss="
            )

    # ------------------------------------------------------------------------------------------------ products

    def jvp(self, x: np.ndarray) -> np.ndarray:
        """J x `(N * K, m)`."""
        m, k = x.shape[1], self.prepared.n_outputs
        if not m:
            return np.zeros((self.prepared.n_examples * k, 0))
        program = self._program("jvp", m)
        out = np.empty((self.prepared.n_examples, k, m))
        self._require_memory(out.nbytes + x.size * 8, m, program.batch)
        spans = _blocks(m, program.columns)
        blocks = self._tangents(x, spans, program.columns)
        for (a, b), batch in self._batches(program.batch):
            for at, tangents in zip(spans, blocks, strict=True):
                part = np.asarray(self._run(program, batch, tangents))
                out[a:b, :, at] = part[: at.stop - at.start, : b - a].transpose(1, 2, 0)
        return out.reshape(-1, m)

    def summed(self, kind: str, x: np.ndarray) -> np.ndarray:
        """A sum over examples `(P, m)`: vjp with cotangents x `(N * K, m)`, gvp or hvp with columns x `(P, m)`."""
        m, k = x.shape[1], self.prepared.n_outputs
        width = max(at.stop for _, at in self.paths.values())
        if not m:
            return np.zeros((width, 0))
        program = self._program(kind, m)
        self._require_memory(width * m * 16, m, program.batch)
        total = np.zeros((m, width))
        cotangents = x.reshape(-1, k, m) if kind == "vjp" else None
        spans = _blocks(m, program.columns)
        blocks = spans if kind == "vjp" else self._tangents(x, spans, program.columns)
        for (a, b), batch in self._batches(program.batch):
            for at, held in zip(spans, blocks, strict=True):
                moved: Any = held
                if cotangents is not None:
                    moved = np.zeros((program.columns, program.batch, k), self._dtype)
                    moved[: at.stop - at.start, : b - a] = cotangents[a:b, :, at].transpose(2, 0, 1)
                for (_, where), part in zip(self.paths.values(), self._run(program, batch, moved), strict=True):
                    total[at, where] += np.asarray(part).reshape(program.columns, -1)[: at.stop - at.start]
        return total.T

    def _require_memory(self, needed: int, n_columns: int, batch: int) -> None:
        """Refuse columns and a result that, beside the inputs, are larger than what is left for them."""
        each, chunks = self.prepared.input_bytes
        # A batch is read and padded while the program holds another.
        allowed = max(0, self.room - chunks - 2 * each * batch)
        if needed > allowed:
            raise InvalidRequestError(
                f"--memory {self.budget.total:,}: {n_columns} column(s) and their product take {format_size(needed)}, "
                f"its part columns has {format_size(allowed)} beside inputs; give more (memory=) or fewer columns at "
                "once"
            )

    @property
    def _dtype(self) -> Any:
        return np.result_type(*(leaf.dtype for leaf in self.prepared.selected), np.float32)

    def _tangents(self, x: np.ndarray, spans: list[slice], count: int) -> list[Any]:
        """Columns `(P, m)` as leaves `(count, *shape)` for each block; those beyond a block's end are zero."""
        blocks = []
        for span in spans:
            leaves = []
            for (shape, at), leaf in zip(self.paths.values(), self.prepared.selected, strict=True):
                held = np.zeros((count, *shape), leaf.dtype)
                held.reshape(count, -1)[: span.stop - span.start] = x[at, span].T
                leaves.append(held)
            blocks.append(leaves)
        # One block may stay where it is multiplied; the program's memory counts it.
        with precision_context(self.float64):
            return [jax.device_put(blocks[0])] if len(blocks) == 1 else blocks

    def _batches(self, size: int) -> Iterator[tuple[tuple[int, int], Any]]:
        """Ranges of examples with what programs take of them; the next is read meanwhile."""
        n = self.prepared.n_examples
        spans = [(a, min(a + size, n)) for a in range(0, n, size)]
        with Pool(1, "jacstore-inputs") as pool:
            pending = pool.submit(self._batch, *spans[0], size)
            for index, span in enumerate(spans):
                ready = pending.result()
                if index + 1 < len(spans):
                    pending = pool.submit(self._batch, *spans[index + 1], size)
                yield span, ready

    def _batch(self, a: int, b: int, size: int) -> Any:
        """Examples, targets and weights, padded to `size` with copies of the last example, of weight zero."""
        weights = (np.arange(size) < b - a).astype(self._dtype)
        numbers = np.minimum(np.arange(a, a + size), b - 1)
        targets = numbers if self.targets is None else jax.tree_util.tree_map(lambda t: t[numbers], self.targets)
        with precision_context(self.float64):
            examples = jax.tree_util.tree_map(lambda leaf: np.asarray(leaf)[numbers - a], self.prepared.read(a, b))
            return jax.device_put((examples, targets, weights))

    def _run(self, program: _Compiled, batch: Any, moved: Any) -> Any:
        with precision_context(self.float64):
            return program.run(*self.parameters, *batch, moved)

    # -------------------------------------------------------------------------------------------- programs

    def _product(self, kind: str) -> Callable[..., Any]:
        """`(selected, rest, examples, targets, weights, columns)` -> a product with each column."""
        function, loss = self.prepared.function, self.loss

        def outputs(selected: Any, rest: Any, examples: Any) -> Any:
            return jax.vmap(lambda example: function(selected, rest, example))(examples)

        def jvp(selected: Any, rest: Any, examples: Any, targets: Any, weights: Any, columns: Any) -> Any:
            _, push = jax.linearize(lambda moved: outputs(moved, rest, examples), selected)
            return jax.vmap(push)(columns)

        def vjp(selected: Any, rest: Any, examples: Any, targets: Any, weights: Any, columns: Any) -> Any:
            found, pull = jax.vjp(lambda moved: outputs(moved, rest, examples), selected)
            return jax.vmap(lambda cotangent: pull(cotangent.astype(found.dtype))[0])(columns)

        def losses(found: Any, targets: Any, weights: Any) -> Any:
            assert loss is not None
            # Padding has weight zero, whatever its loss.
            return jnp.where(weights > 0, jax.vmap(loss)(found, targets), 0).sum()

        def gvp(selected: Any, rest: Any, examples: Any, targets: Any, weights: Any, columns: Any) -> Any:
            found, push = jax.linearize(lambda moved: outputs(moved, rest, examples), selected)
            _, pull = jax.vjp(lambda moved: outputs(moved, rest, examples), selected)
            _, bend = jax.linearize(jax.grad(lambda moved: losses(moved, targets, weights)), found)
            return jax.vmap(lambda column: pull(bend(push(column)))[0])(columns)

        def hvp(selected: Any, rest: Any, examples: Any, targets: Any, weights: Any, columns: Any) -> Any:
            slope = jax.grad(lambda moved: losses(outputs(moved, rest, examples), targets, weights))
            _, push = jax.linearize(slope, selected)
            return jax.vmap(push)(columns)

        return {"jvp": jvp, "vjp": vjp, "gvp": gvp, "hvp": hvp}[kind]

    def _program(self, kind: str, n_columns: int) -> _Compiled:
        """The program for so many columns, with the largest batch and block that its memory allows."""
        wanted = min(n_columns, LIMITS.columns_together)
        if (kind, wanted) in self._compiled:
            return self._compiled[kind, wanted]
        allowed = device_memory(None, self.budget)
        columns, batch = wanted, self._largest_batch()
        while True:
            compiled, needed = self._compile(kind, batch, columns)
            if needed <= allowed:
                break
            if batch > columns and self.batch_size is None and batch > 1:
                batch = max(1, min(batch // 2, batch * allowed // needed))
            elif columns > 1:
                columns //= 2
            else:
                source, _ = where_from(None, AUTODIFF["device_pass"])
                raise InvalidRequestError(
                    f"a product with {batch} example(s) takes {format_size(needed)}, {source} has "
                    f"{format_size(allowed)}; give a smaller batch_size= or more memory="
                )
        self._compiled[kind, wanted] = _Compiled(run=compiled, batch=batch, columns=columns)
        return self._compiled[kind, wanted]

    def _largest_batch(self) -> int:
        """Examples that may be read at once: half of the room is theirs, the other one that of columns."""
        wanted = min(self.batch_size or LARGEST_BATCH, self.prepared.n_examples)
        found = examples_at_once(self.prepared.input_bytes, self.room // 2, wanted)
        if self.batch_size and found < wanted:
            raise InvalidRequestError(
                f"batch_size={self.batch_size}: at most {found} example(s) may be read at once, with --memory "
                f"{self.budget.total:,}; give a smaller batch_size= or more memory (memory=)"
            )
        return found

    def _compile(self, kind: str, batch: int, columns: int) -> tuple[Any, int]:
        values = self._batch(0, min(batch, self.prepared.n_examples), batch)
        k = self.prepared.n_outputs
        with precision_context(self.float64):
            if kind == "vjp":
                moved: Any = jax.ShapeDtypeStruct((columns, batch, k), self._dtype)
            else:
                moved = [jax.ShapeDtypeStruct((columns, *leaf.shape), leaf.dtype) for leaf in self.prepared.selected]
            with reraise_user_error(
                f"the {kind.upper()} of apply failed:", "rules of custom_vjp have no JVP; change apply= or loss="
            ):
                program = jax.jit(self._product(kind)).lower(*self.parameters, *values, moved).compile()
        analysis = program.memory_analysis()
        if analysis is None:
            return program, 0
        sizes = (analysis.argument_size_in_bytes, analysis.temp_size_in_bytes, analysis.output_size_in_bytes)
        return program, int(sum(sizes))


def _blocks(n_columns: int, width: int) -> list[slice]:
    return [slice(a, min(a + width, n_columns)) for a in range(0, n_columns, width)]

"""The pass of a PyTorch network that turns batches of examples into rows and factors.

The VJP of one example is mapped over outputs and over examples by `torch.func`, so that nothing couples examples and
layers need not know where the batch axis is. Before that, plain autograd finds the layers and computes the gradients of
the first examples, which the pass has to reproduce.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from jacstore.base.budget import ACCELERATOR, TORCH_BUILD, TORCH_PASS, Budget
from jacstore.base.machine import format_size
from jacstore.errors import InvalidFunctionError, InvalidRequestError
from jacstore.problem.inputs import Examples
from jacstore.rows.device_pass import LARGEST_BATCH, BatchRows
from jacstore.rows.options import BuildOptions
from jacstore.rows.torch.choose_terms import choose_terms, form_rows
from jacstore.rows.torch.hooks import Key, Taps, Varies, find_layers
from jacstore.rows.torch.network import Network, calling, host, leaves_of, mapped, path_of, probe_module
from jacstore.terms.kinds import expand
from jacstore.terms.row_products import squared_norms

# Rows, factors and activations of a batch, whatever the memory: a resumed build then cuts units into the same batches.
BATCH_BYTES = {"cpu": 64_000_000}
BATCH_BYTES_ELSEWHERE = 1_000_000_000
EXAMPLES_COMPARED = 2
# What is done before the first batch: the module is tried, its calls are seen, terms are chosen and compared.
STEPS = ("probe", "calls", "choice", "comparison")
# Further ones where the module may branch on values.
ELSEWHERE = 8

Tensors = dict[str, torch.Tensor]


class TorchPass:
    """The pass from a batch of examples to rows, factors, norms and outputs.

    Attributes
    ----------
    cut
        The terms of every leaf, chosen by the layout, each checked against autograd at the first examples.
    mapped
        Whether examples are mapped over by `torch.func.vmap`.
    batch_size, output_batch
        Examples per batch, outputs per slice.
    bytes_needed
        Expected bytes of a batch, from what autograd keeps for one example.
    seconds
        Seconds of each step before the first batch.
    """

    def __init__(
        self,
        network: Network,
        source: Examples,
        options: BuildOptions,
        wrong: Collection[str] = (),
        mapped_over: bool = True,
    ) -> None:
        self.network, self._taps, self.mapped = network, Taps(), mapped_over
        first = source.read(0, min(EXAMPLES_COMPARED, source.n_examples))
        example = mapped(lambda leaf: leaf[0], first)
        self.seconds = dict.fromkeys(STEPS, 0.0)
        with self._timed("probe"):
            self.n_outputs = probe_module(network, example)
        with self._timed("calls"), calling(example):
            truth = _Plain(network, self._taps, network.tensors(first), self.n_outputs)
        self.wrong = {name for name in network.selected if path_of(name) in wrong}
        while True:
            with self._timed("choice"):
                found = truth.layers, truth.outside
                self.cut = choose_terms(network, *found, self.n_outputs, options.layout, self.wrong)
            with self._timed("comparison"):
                differing = self._tried(network.tensors(first), example, truth)
                if not (differing or self.mapped):
                    differing = self._tried_elsewhere(source)
            if not differing:
                break
            if self.mapped and differing & set(self.cut.generic):
                # Some layers have a wrong rule for vmap (PReLU with one slope): autograd takes one cotangent at a time.
                self.mapped = False
                continue
            self.refuse_generic(differing, 0)
            self.wrong |= differing
        self._size(truth, options, source.n_examples)

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[step] += time.perf_counter() - began

    def _tried(self, examples: Any, example: Any, truth: _Plain) -> set[str]:
        """Parameters whose chosen terms are wrong at the first examples."""
        try:
            with calling(example):
                _, held, generic = self._first_values(examples, truth.cotangent[None])
        except Varies as error:
            return error.names
        except InvalidRequestError:
            # Calls that cannot be followed, such as a pass that is recomputed for its gradient, are left to autograd.
            if not self.cut.layers:
                raise
            return {name for layer in self.cut.layers for name, _ in layer.parameters} - set(self.cut.generic)
        if not np.isfinite(truth.norm):
            return set()  # the build reports such examples
        return self._differing(self._formed(held, generic), truth.gradients)

    def _tried_elsewhere(self, source: Examples) -> set[str]:
        """The same at a few other examples: a module that cannot be mapped may look at values and branch."""
        draw = np.random.default_rng(0)
        for n in draw.permutation(source.n_examples)[:ELSEWHERE]:
            read = source.read(int(n), int(n) + 1)
            example = mapped(lambda leaf: leaf[0], self.network.tensors(read))
            cotangent = draw.standard_normal(self.n_outputs).astype(np.float32)
            with calling(mapped(lambda leaf: leaf[0], read)):
                try:
                    found = self._formed(*self._alone(example, cotangent))
                except Varies as error:
                    return error.names
                differing = self.wrong_at(example, cotangent, found)
            if differing:
                self.refuse_generic(differing, int(n))
                return differing
        return set()

    def refuse_generic(self, names: set[str], example: int) -> None:
        """Raise where even rows of `torch.func` or autograd are not the gradient."""
        wrong = names & set(self.cut.generic)
        if wrong:
            raise InvalidFunctionError(
                f"parameter {min(wrong)!r} has other gradients by torch.func than by autograd at example {example}; do "
                "not detach it or change it in place in module="
            )

    def _first_values(self, examples: Any, cotangents: torch.Tensor) -> Any:
        """Values of the first examples, mapped over them if that can be."""
        try:
            return self._values(examples, cotangents)
        except (InvalidRequestError, Varies):
            raise
        except Exception:
            if not self.mapped:
                raise
            # Some layers have no rule for vmap, or look at values: then examples are taken one at a time.
            self.mapped = False
            return self._values(examples, cotangents)

    def _formed(self, held: Tensors, generic: Tensors) -> dict[str, np.ndarray]:
        """Rows `(n, size)` of every parameter from values for one cotangent."""
        found = {}
        for name, leaf in zip(self.network.selected, self.cut.leaves, strict=True):
            if leaf.dense:
                rows = self._rows(name, held, generic)
            else:
                # As a reader of the store will form them.
                rows = expand(leaf.terms, {name: host(held[name]) for name in leaf.operands}, leaf.size)
            found[name] = rows[:, 0].astype(np.float64)
        return found

    def _differing(self, found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], power: float = 0.5) -> set[str]:
        """Parameters whose rows, weighted by a random cotangent, are not what plain autograd gives."""
        tolerance = float(torch.finfo(self.network.lowest).eps) ** power
        norm = float(np.sqrt(sum(np.vdot(g, g) for g in wanted.values())))
        # A gradient that is nothing but rounding is no smaller than a share of the whole.
        return {
            name
            for name, g in wanted.items()
            if not np.linalg.norm(found[name] - g) <= tolerance * (np.linalg.norm(g) + tolerance * norm)
        }

    def plain(self, example: Any, cotangent: np.ndarray) -> dict[str, np.ndarray]:
        """Gradients `(1, size)` of one example, weighted by a cotangent `(K,)`: one plain backward pass, no taps."""
        values = {name: value.detach().requires_grad_() for name, value in self.network.selected.items()}

        def gradients() -> list[torch.Tensor]:
            outputs = self.network(values, example)
            weights = torch.from_numpy(cotangent).to(outputs.device, outputs.dtype)
            return _gradients(outputs, list(values.values()), weights)

        found = self.network.holding(values, gradients)
        return {
            name: host(g).reshape(1, -1).astype(np.float64)
            for name, g in zip(self.network.selected, found, strict=True)
        }

    def wrong_at(self, example: Any, cotangent: np.ndarray, found: dict[str, np.ndarray]) -> set[str]:
        """Parameters whose rows of one example, weighted by a cotangent, are not what plain autograd gives.

        A ReLU may fall to the other side of zero when examples are computed together. So what differs counts only if
        it does so too when the example is computed by itself, in the same steps as autograd, or differs by far.
        """
        wanted = self.plain(example, cotangent)
        if not all(np.isfinite(g).all() for g in wanted.values()):
            return set()  # the build reports such examples
        differing = self._differing(found, wanted)
        if differing:
            try:
                again = self._differing(self._formed(*self._alone(example, cotangent)), wanted)
            except Varies as error:
                return error.names
            differing &= again | self._differing(found, wanted, 0.25)
        return differing

    def _alone(self, example: Any, cotangent: np.ndarray) -> tuple[Tensors, Tensors]:
        """Operands and generic rows of one example and one cotangent, by plain autograd."""
        weights = torch.from_numpy(cotangent).to(self.network.device, self.network.dtype)
        _, inputs, back, rows = self._values_in_turn(mapped(lambda leaf: leaf[None], example), weights[None])
        return {**inputs, **back}, rows

    def _size(self, truth: _Plain, options: BuildOptions, n_examples: int) -> None:
        budget = device_budget(self.network.device, options)
        allowed = budget.split(**TORCH_PASS)["estimated"]
        cut, itemsize = self.cut, self.network.dtype.itemsize
        numbers = sum(leaf.size for leaf in cut.leaves if leaf.dense)
        numbers += sum(layer.cotangents.numbers(1) for layer in cut.layers)
        once = truth.saved_bytes + itemsize * sum(layer.inputs.numbers(1) for layer in cut.layers)
        each = 2 * itemsize * numbers + truth.largest_saved
        self.output_batch = max(1, min(self.n_outputs, options.output_batch or (allowed - once) // each))
        needed = once + self.output_batch * each
        wanted = BATCH_BYTES.get(self.network.device.type, BATCH_BYTES_ELSEWHERE)
        fits = max(1, min(min(allowed, wanted) // needed, LARGEST_BATCH))
        self.batch_size = min(options.batch_size or fits, n_examples)
        self.bytes_needed = needed * (self.batch_size if self.mapped else 1)
        if options.device_memory is not None and self.bytes_needed > budget.total:
            smaller = ["--batch-size (batch_size=)"] * (self.batch_size > 1)
            smaller += ["--output-batch (output_batch=)"] * (self.output_batch > 1)
            raise InvalidRequestError(
                f"--device-memory {budget.total:,}: a batch of {self.batch_size} example(s) and {self.output_batch} "
                f"output(s) takes about {format_size(self.bytes_needed)}; give "
                f"{'a smaller ' + ' or '.join(smaller) + ', or ' if smaller else ''}more (device_memory=)"
            )

    def outputs(self, examples: Any) -> torch.Tensor:
        """Outputs `(K,)` of the first of some examples, without hooks."""
        with torch.no_grad():
            return self.network({}, mapped(lambda leaf: leaf[0], self.network.tensors(examples)))

    def run(self, examples: Any) -> Iterator[BatchRows]:
        """Rows of a batch, a slice of outputs at a time."""
        given = self.network.tensors(examples)
        unit = torch.eye(self.n_outputs, dtype=self.network.dtype, device=self.network.device)
        for first in range(0, self.n_outputs, self.output_batch):
            outputs, held, generic = self._values(given, unit[first : first + self.output_batch])
            factors = {operand.name: host(held[operand.name]) for operand in self.cut.operands}
            rows, norms = [], []
            for leaf, name in zip(self.cut.leaves, self.network.selected, strict=True):
                if leaf.dense is None:
                    norms.append(squared_norms(leaf, factors).sum(-1, dtype=np.float64))
                    continue
                rows.append(self._rows(name, held, generic))
                norms.append(np.square(rows[-1], dtype=np.float64).sum(-1))
            yield BatchRows(
                first_output=first,
                last=first + self.output_batch >= self.n_outputs,
                rows=rows,
                factors=factors,
                norms=np.stack(norms, -1),
                outputs=host(outputs),
            )

    def _rows(self, name: str, held: Tensors, generic: Tensors) -> np.ndarray:
        """Rows `(n, k, size)` of a leaf that is stored by them."""
        terms = self.cut.rows[name]
        return host(form_rows(terms, held) if terms else generic[name])

    def _values(self, examples: Any, cotangents: torch.Tensor) -> tuple[torch.Tensor, Tensors, Tensors]:
        """Outputs `(n, K)`, operands `(n, ...)` and `(n, k, ...)`, and rows `(n, k, size)` of the generic leaves."""
        values = self._mapped_values if self.mapped else self._values_in_turn
        outputs, inputs, back, rows = values(examples, cotangents)
        return outputs, {**inputs, **back}, rows

    def _mapped_values(self, examples: Any, cotangents: torch.Tensor) -> Any:
        def one(example: Any, cotangents: torch.Tensor) -> Any:
            generic = {name: self.network.selected[name] for name in self.cut.generic}
            made: Any = torch.func.vjp(
                lambda zeros, leaves: self._forward(zeros, leaves, example), self._zeros(), generic, has_aux=True
            )
            outputs, pull, inputs = made

            def back(cotangent: torch.Tensor) -> Any:
                return self._operands(*pull(cotangent.to(outputs.dtype)))

            pulled, rows = torch.func.vmap(back)(cotangents)
            return outputs, inputs, pulled, rows

        with torch.no_grad():
            return torch.func.vmap(one, in_dims=(0, None))(examples, cotangents)

    def _values_in_turn(self, examples: Any, cotangents: torch.Tensor) -> Any:
        """The same, one example and one cotangent after another, by plain autograd."""
        found = []
        for n in range(len(leaves_of(examples)[0])):
            example = mapped(lambda leaf, n=n: leaf[n], examples)
            generic = {name: self.network.selected[name].detach().requires_grad_() for name in self.cut.generic}
            try:
                one = partial(self._values_of_one, generic, example, cotangents)
                found.append(self.network.holding(generic, one))
            except Varies as error:
                error.example = n
                raise
        return _stacked(found)

    def _values_of_one(self, generic: Tensors, example: Any, cotangents: torch.Tensor) -> Any:
        zeros = {name: [z.requires_grad_() for z in given] for name, given in self._zeros().items()}
        outputs, inputs = self._forward(zeros, generic, example)
        moving = [*(z for given in zeros.values() for z in given), *generic.values()]
        back = []
        for cotangent in cotangents:
            pulled = iter(_gradients(outputs, moving, cotangent))
            back.append(
                self._operands(
                    {name: [next(pulled) for _ in given] for name, given in zeros.items()},
                    {name: next(pulled) for name in generic},
                )
            )
        return outputs, inputs, *_stacked(back)

    def _zeros(self) -> dict[Key, list[torch.Tensor]]:
        return {layer.key: [z.detach() for z in layer.outputs] for layer in self.cut.layers}

    def _forward(self, zeros: Any, generic: Any, example: Any) -> tuple[torch.Tensor, Tensors]:
        """Outputs `(K,)` of one example, and the inputs of its layers."""
        if not self.cut.layers:
            return self.network(generic, example), {}
        names = {name for layer in self.cut.layers for name, _ in layer.parameters}
        followed = {name: generic.get(name, self.network.selected[name]) for name in names}
        with self._taps.running(followed, zeros, names - set(generic)):
            outputs = self.network(generic, example)
        given = {layer.key: [call.given for call in self._taps.calls[layer.key]] for layer in self.cut.layers}
        # Several layers may share an input, which is formed once.
        by_operand = {layer.inputs.name: layer for layer in self.cut.layers}
        return outputs, {name: layer.as_inputs(given[layer.key]) for name, layer in by_operand.items()}

    def _operands(self, zeros: Any, generic: Any) -> tuple[Tensors, Tensors]:
        """Cotangents of one output in the form of operands, and flat rows."""
        back = {layer.cotangents.name: layer.as_cotangents(zeros[layer.key]) for layer in self.cut.layers}
        return back, {name: row.reshape(-1) for name, row in generic.items()}


def device_budget(device: torch.device, options: BuildOptions) -> Budget:
    """What a pass may take: of what is free on a GPU, on a CPU of the host's memory."""
    if options.device_memory is not None:
        return Budget(options.device_memory)
    if device.type == "cuda":
        return Budget(Budget(int(torch.cuda.mem_get_info(device)[0])).split(**ACCELERATOR)["jacstore"])
    return Budget(Budget(options.memory).split(**TORCH_BUILD)["device_pass"])


class _Plain:
    """The results of autograd at the first examples: layers, uses of parameters, gradients, memory.

    Attributes
    ----------
    layers, outside
        From `find_layers`.
    cotangent, gradients, norm
        A random cotangent `(K,)`, the gradients `(n, size)` by name that it gives, and the norm of all.
    saved_bytes, largest_saved
        Bytes that autograd keeps for the backward pass of one example.
    """

    def __init__(self, network: Network, taps: Taps, examples: Any, n_outputs: int) -> None:
        network.selected = {name: value.detach().requires_grad_() for name, value in network.selected.items()}
        self.layers, self.outside = find_layers(network, taps, mapped(lambda leaf: leaf[0], examples))
        draw = torch.Generator().manual_seed(0)
        self.cotangent = torch.randn(n_outputs, generator=draw).to(network.device, network.dtype)
        parameters = {value.untyped_storage().data_ptr() for value in {**network.selected, **network.rest}.values()}
        sizes: list[int] = [0]

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in parameters:
                sizes.append(tensor.nbytes)
            return tensor

        def gradients(n: int) -> list[torch.Tensor]:
            sizes[:] = [0]
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                outputs = network({}, mapped(lambda leaf: leaf[n], examples))
            return _gradients(outputs, list(network.selected.values()), self.cotangent)

        count = len(leaves_of(examples)[0])
        found = [network.holding({}, partial(gradients, n)) for n in range(count)]
        self.saved_bytes, self.largest_saved = sum(sizes), max(sizes)
        self.gradients = {
            name: np.stack([host(gradients[i]).reshape(-1) for gradients in found]).astype(np.float64)
            for i, name in enumerate(network.selected)
        }
        self.norm = float(np.sqrt(sum(np.vdot(g, g) for g in self.gradients.values())))
        network.selected = {name: value.detach() for name, value in network.selected.items()}
        taps.calls = {}


def _gradients(outputs: torch.Tensor, moving: list[torch.Tensor], cotangent: torch.Tensor) -> list[torch.Tensor]:
    """VJP of outputs, with zeros for tensors that they do not depend on; the graph is kept."""
    if not outputs.requires_grad or not moving:
        return [torch.zeros_like(value) for value in moving]
    found = torch.autograd.grad(outputs, moving, cotangent.to(outputs.dtype), retain_graph=True, allow_unused=True)
    return [
        torch.zeros_like(value) if g is None else g.to_dense() if g.is_sparse else g
        for g, value in zip(found, moving, strict=True)
    ]


def _stacked(found: list[Any]) -> Any:
    """Equal trees of tensors as one tree of tensors with a new first axis."""
    if isinstance(found[0], dict):
        return {key: _stacked([one[key] for one in found]) for key in found[0]}
    if isinstance(found[0], tuple):
        return tuple(_stacked(list(parts)) for parts in zip(*found, strict=True))
    return torch.stack([one.detach() for one in found])

"""In: a torch module and its examples. Out: the store of its per-example Jacobian, resumable; needs the extra `torch`.

    import jacstore.torch

    store = jacstore.torch.build(module.eval(), x, "run.jac", memory="8GB")

Layers that are known (Linear, Conv1d to Conv3d, Embedding) give factors by hooks, all other parameters rows by
`torch.func`, in one pass: the VJP of one example, mapped over outputs and over examples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jacstore import hierarchy, machine
from jacstore.blocks import UnitBlock
from jacstore.builder import LAYOUTS
from jacstore.contraction import squared_norms
from jacstore.errors import Interrupted, Mismatch, ProbeFailed, Refused
from jacstore.inputs import Arrays, Dataset, is_dataset
from jacstore.jacobian import LARGEST_BATCH, BatchRows
from jacstore.machine import format_size
from jacstore.progress import BatchDone, Listener, Started, silent
from jacstore.store import DTYPES, JacobianStore
from jacstore.terms import expand
from jacstore.torch_layers import Taps, choose_terms, find_layers
from jacstore.torch_network import Network, calling, close, leaves_of, mapped, probe, requested, settings
from jacstore.unit import Unit, refuse_other_inputs
from jacstore.writer import StoreWriter

# Rows, factors and activations of a batch, whatever the memory: a resumed build then cuts units into the same batches.
BATCH_BYTES = {"cpu": 64_000_000}
BATCH_BYTES_ELSEWHERE = 1_000_000_000
EXAMPLES_COMPARED = 2


def build(
    module: torch.nn.Module,
    inputs: Any,
    out: str | Path | None = None,
    *,
    outputs: str | Sequence[int] = "all",
    memory: int | str | None = None,
    dtype: str = "float32",
    layout: str = "auto",
    unit_size: int | None = None,
    batch_size: int | None = None,
    part: tuple[int, int] | str | None = None,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    listener: Listener = silent,
    stop: Callable[[], bool] = lambda: False,
) -> JacobianStore:
    """Compute the per-example Jacobian of a module once and store it; a rerun computes only what is missing.

    Parameters
    ----------
    module
        In evaluation mode. Columns are its parameters that require a gradient, in the order of `named_parameters`.
    inputs
        Tensors or arrays `(N, ...)`, or a map-style dataset; a tuple is passed as arguments, a dict as keywords.
        Floating inputs are given in the type of the module's first parameter.
    outputs
        "all", "sum" (gradient of the summed outputs) or indices into the flattened outputs of one example.
    out, memory, dtype, layout, unit_size, batch_size, part, allow_nonfinite, overwrite, listener, stop
        As for `jacstore.build`.

    Returns
    -------
    JacobianStore
        With `.report`; `report["vmap"]` is false where the module cannot be mapped over examples (recurrent layers, for
        instance) and they were taken one at a time.

    Raises
    ------
    Refused
        For anything that the caller must change; nothing finished is lost.
    """
    started = time.perf_counter()
    for name, given, allowed in (("dtype", dtype, DTYPES), ("layout", layout, LAYOUTS)):
        if given not in allowed:
            raise Refused(f"{name}={given}: allowed are {', '.join(allowed)}")
    source = _source(inputs)
    if source.n_examples == 0:
        raise Refused("inputs holds 0 examples; at least 1 is needed; change inputs=")
    budget = machine.default_memory(memory)
    with settings():
        network = Network(module, outputs, dtype == "float64")
        passes = TorchPass(network, source, layout, budget, hierarchy.parse_count(batch_size, "--batch-size"))
        writer = StoreWriter(
            out,
            passes.cut.leaves,
            source.n_examples,
            passes.n_outputs,
            operands=passes.cut.operands,
            dtype=dtype,
            unit_size=unit_size,
            memory=budget,
            outputs_dtype="float64" if dtype == "float64" else "float32",
            requested={**requested(network, source.read(0, 1)), "layout": layout},
            left_out=network.left_out,
            part=hierarchy.parse_part(part),
            allow_nonfinite=allow_nonfinite,
            overwrite=overwrite,
            listener=listener,
            stop=stop,
        )
        _refuse_small_memory(writer, budget)
        with writer:
            reused = len(writer.units) - len(writer.missing)
            listener(Started(what="units", total=len(writer.units), done=reused))
            _refuse_other_results(writer, passes, source)
            times = _run(writer, passes, source, listener, stop)
            computed = len(writer.units) - len(writer.missing) - reused
    store = writer.store
    facts = store.info()
    store.report = {
        "store": store.path,
        "examples": store.n_examples,
        "outputs": store.n_outputs,
        "parameters": store.n_parameters,
        "leaves": len(store.leaves),
        "units_total": store.n_units,
        "units_computed": computed,
        "units_reused": reused,
        "bytes_stored": facts["bytes_stored"],
        "bytes_dense": facts["bytes_dense"],
        "seconds_total": time.perf_counter() - started,
        **times,
        "peak_rss": machine.peak_rss(),
        "complete": facts["complete"],
        "batch_size": passes.batch_size,
        "vmap": passes.mapped,
    }
    return store


# --------------------------------------------------------------------------------------------------------------- inputs


class _OnHost:
    """A tensor read as NumPy arrays, from whatever device and type."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape = tensor.detach(), tuple(tensor.shape)

    def __getitem__(self, index: slice) -> np.ndarray:
        return _host(self.tensor[index])


class _Items:
    """A dataset whose items may hold tensors."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return mapped(lambda leaf: _host(leaf) if isinstance(leaf, torch.Tensor) else leaf, self.items[index])


def _source(inputs: Any) -> Arrays | Dataset:
    if is_dataset(inputs):
        return Dataset(_Items(inputs))
    return Arrays(mapped(lambda leaf: _OnHost(leaf) if isinstance(leaf, torch.Tensor) else leaf, inputs))


def _host(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    narrow = tensor.is_floating_point() and tensor.element_size() < 4
    return (tensor.float() if narrow else tensor).cpu().numpy()


# ------------------------------------------------------------------------------------------------------------- the pass


class TorchPass:
    """Batches of examples in, rows, factors, norms and outputs out.

    Attributes
    ----------
    cut
        The terms of every leaf, chosen by `layout`, each checked against autograd at the first examples.
    mapped
        Whether examples are mapped over by `torch.func.vmap`.
    batch_size, output_batch
        Examples a batch, outputs a slice.
    """

    def __init__(
        self, network: Network, source: Arrays | Dataset, layout: str, budget: int, batch_size: int | None
    ) -> None:
        self.network, self._taps, self.mapped = network, Taps(network), True
        first = source.read(0, min(EXAMPLES_COMPARED, source.n_examples))
        example = mapped(lambda leaf: leaf[0], first)
        self.n_outputs = probe(network, example)
        with calling(example):
            truth = _Plain(network, self._taps, network.tensors(first), self.n_outputs)
        wrong: set[str] = set()
        while True:
            self.cut = choose_terms(network, truth.layers, truth.outside, self.n_outputs, layout, wrong)
            with calling(example):
                _, held, generic = self._first_values(network.tensors(first), truth.cotangent[None])
            differing = self._differing(held, generic, truth)
            if not differing:
                break
            if differing & set(self.cut.generic):
                raise ProbeFailed(
                    f"parameter {min(differing)!r} has other gradients by torch.func than by autograd; do not detach "
                    "it or change it in place in module="
                )
            wrong |= differing
        self._size(truth, budget, batch_size, source.n_examples)

    def _first_values(self, examples: Any, cotangents: torch.Tensor) -> Any:
        """Values of the first examples, mapped over them if that can be."""
        try:
            return self._values(examples, cotangents)
        except Refused:
            raise
        except Exception:
            # Some layers have no rule for vmap, or look at values: then examples are taken one at a time.
            self.mapped = False
            return self._values(examples, cotangents)

    def _differing(self, held: Any, generic: Any, truth: _Plain) -> set[str]:
        """Parameters whose rows, weighted by a random cotangent, are not what plain autograd gives."""
        found: set[str] = set()
        if not np.isfinite(truth.norm):
            return found  # the build reports such examples
        tolerance = torch.finfo(self.network.dtype).eps ** 0.5
        for (name, wanted), leaf in zip(truth.gradients.items(), self.cut.leaves, strict=True):
            terms = self.cut.rows[name] if leaf.dense else leaf.terms
            rows = expand(terms, held, leaf.size)[:, 0] if terms else generic[name][:, 0]
            difference = np.linalg.norm(rows.astype(np.float64) - wanted)
            # A gradient that is nothing but rounding is no smaller than a share of the whole.
            if not difference <= tolerance * (np.linalg.norm(wanted) + tolerance * truth.norm):
                found.add(name)
        return found

    def _size(self, truth: _Plain, budget: int, batch_size: int | None, n_examples: int) -> None:
        cut, itemsize = self.cut, self.network.dtype.itemsize
        numbers = sum(leaf.size for leaf in cut.leaves if leaf.dense)
        numbers += sum(layer.cotangents.numbers(1) for layer in cut.layers)
        once = truth.saved_bytes + itemsize * sum(layer.inputs.numbers(1) for layer in cut.layers)
        each = 2 * itemsize * numbers + truth.largest_saved
        self.output_batch = max(1, min(self.n_outputs, (budget // 8 - once) // each))
        needed = once + self.output_batch * each
        wanted = BATCH_BYTES.get(self.network.device.type, BATCH_BYTES_ELSEWHERE)
        fits = max(1, min(min(budget // 8, wanted) // needed, LARGEST_BATCH))
        self.batch_size = min(batch_size or fits, n_examples)
        self.bytes_needed = needed * (self.batch_size if self.mapped else 1)

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
            rows, norms = [], []
            for leaf, name in zip(self.cut.leaves, self.network.selected, strict=True):
                if leaf.dense is None:
                    norms.append(squared_norms(leaf, held).sum(-1, dtype=np.float64))
                    continue
                terms = self.cut.rows[name]
                rows.append(expand(terms, held, leaf.size) if terms else generic[name])
                norms.append(np.square(rows[-1], dtype=np.float64).sum(-1))
            yield BatchRows(
                first_output=first,
                last=first + self.output_batch >= self.n_outputs,
                rows=rows,
                factors={operand.name: held[operand.name] for operand in self.cut.operands},
                norms=np.stack(norms, -1),
                outputs=outputs,
            )

    def _values(
        self, examples: Any, cotangents: torch.Tensor
    ) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Outputs `(n, K)`, operands `(n, ...)` and `(n, k, ...)`, and rows `(n, k, size)` of the generic leaves."""
        found = (self._mapped_values if self.mapped else self._values_in_turn)(examples, cotangents)
        outputs, inputs, back, rows = found
        held = {name: _host(value) for name, value in {**inputs, **back}.items()}
        return _host(outputs), held, {name: _host(value) for name, value in rows.items()}

    def _mapped_values(self, examples: Any, cotangents: torch.Tensor) -> Any:
        def one(example: Any, cotangents: torch.Tensor) -> Any:
            generic = {name: self.network.selected[name] for name in self.cut.generic}
            outputs, pull, inputs = torch.func.vjp(
                lambda zeros, leaves: self._forward(zeros, leaves, example), self._zeros(), generic, has_aux=True
            )

            def back(cotangent: torch.Tensor) -> Any:
                return self._operands(*pull(cotangent))

            pulled, rows = torch.func.vmap(back)(cotangents)
            return outputs, inputs, pulled, rows

        with torch.no_grad():
            return torch.func.vmap(one, in_dims=(0, None))(examples, cotangents)

    def _values_in_turn(self, examples: Any, cotangents: torch.Tensor) -> Any:
        """The same, one example and one cotangent after another, by plain autograd."""
        found = []
        for n in range(len(leaves_of(examples)[0])):
            example = mapped(lambda leaf, n=n: leaf[n], examples)
            zeros = {name: [z.requires_grad_() for z in given] for name, given in self._zeros().items()}
            generic = {name: self.network.selected[name].detach().requires_grad_() for name in self.cut.generic}
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
            found.append((outputs, inputs, *_stacked(back)))
        return _stacked(found)

    def _zeros(self) -> dict[str, list[torch.Tensor]]:
        return {layer.name: [z.detach() for z in layer.outputs] for layer in self.cut.layers}

    def _forward(self, zeros: Any, generic: Any, example: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Outputs `(K,)` of one example, and what went into its layers."""
        with self._taps.running(zeros):
            outputs = self.network(generic, example)
        given = {layer.name: [call.given for call in self._taps.calls[layer.name]] for layer in self.cut.layers}
        # Several layers may share what went in: it is formed once.
        by_operand = {layer.inputs.name: layer for layer in self.cut.layers}
        return outputs, {name: layer.as_inputs(given[layer.name]) for name, layer in by_operand.items()}

    def _operands(self, zeros: Any, generic: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Cotangents of one output in the form of operands, and flat rows."""
        back = {layer.cotangents.name: layer.as_cotangents(zeros[layer.name]) for layer in self.cut.layers}
        return back, {name: row.reshape(-1) for name, row in generic.items()}


class _Plain:
    """What autograd itself gives at the first examples: layers, uses of parameters, gradients, memory.

    Attributes
    ----------
    layers, outside
        From `find_layers`.
    cotangent, gradients, norm
        A random cotangent `(K,)`, the gradients `(n, size)` by name that it gives, and the norm of all.
    saved_bytes, largest_saved
        What autograd keeps of one example for the backward pass.
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

        found = []
        for n in range(len(leaves_of(examples)[0])):
            sizes[:] = [0]
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                outputs = network({}, mapped(lambda leaf, n=n: leaf[n], examples))
            found.append(_gradients(outputs, list(network.selected.values()), self.cotangent))
        self.saved_bytes, self.largest_saved = sum(sizes), max(sizes)
        self.gradients = {
            name: np.stack([_host(gradients[i]).reshape(-1) for gradients in found]).astype(np.float64)
            for i, name in enumerate(network.selected)
        }
        self.norm = float(np.sqrt(sum(np.vdot(g, g) for g in self.gradients.values())))
        network.selected = {name: value.detach() for name, value in network.selected.items()}
        taps.calls = {}


def _gradients(outputs: torch.Tensor, moving: list[torch.Tensor], cotangent: torch.Tensor) -> list[torch.Tensor]:
    """VJP of outputs with zeros for what they do not depend on; the graph is kept."""
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


# ------------------------------------------------------------------------------------------------------------- the loop


def _run(
    writer: StoreWriter,
    passes: TorchPass,
    source: Arrays | Dataset,
    listener: Listener,
    stop: Callable[[], bool],
) -> dict[str, float]:
    """Compute and write the missing units, one being written while the next is filled."""
    times = {"seconds_device": 0.0, "seconds_write": 0.0}
    spare: list[dict[str, UnitBlock]] = []
    writing: Future[float] | None = None
    stopped = False
    with ThreadPoolExecutor(1, "jacstore-unit") as pool:
        for start, last in writer.missing:
            unit = Unit(writer, start, last, "float64" if writer.dtype == "float64" else "float32", spare)
            for a in range(start, last, passes.batch_size):
                stopped = stop()
                if stopped:
                    break
                began = time.perf_counter()
                b = min(a + passes.batch_size, last)
                examples = source.read(a, b)
                for rows in passes.run(examples):
                    unit.fill(a, rows)
                unit.inputs.update(examples)
                listener(BatchDone(examples=b - a))
                times["seconds_device"] += time.perf_counter() - began
            if stopped:
                break
            times["seconds_write"] += writing.result() if writing else 0.0
            writing = pool.submit(unit.write)
        times["seconds_write"] += writing.result() if writing else 0.0
    if stopped:
        raise Interrupted(
            f"interrupted; finished work is kept, {len(writer.missing)} of {len(writer.units)} units missing"
        )
    return times


def _refuse_small_memory(writer: StoreWriter, budget: int) -> None:
    unit = writer.store.bytes_decoded // writer.store.n_examples * writer.store.unit_size
    if writer.missing and 2 * unit > budget - writer.files.bytes_held:
        raise Refused(
            f"memory={budget:,}: two units of {writer.store.unit_size} example(s) take {format_size(2 * unit)}; give "
            "more memory (memory=) or a smaller unit_size="
        )


def _refuse_other_results(writer: StoreWriter, passes: TorchPass, source: Arrays | Dataset) -> None:
    """Refuse other inputs, or other outputs at the same inputs, than those that finished units were made from.

    The text of a module does not say all that it computes: outputs of some finished examples are computed again.
    """
    store = writer.store
    for unit in refuse_other_inputs(writer, source.read):
        start, _ = store.unit_range(unit)
        kept = torch.from_numpy(store.outputs[start])
        if not close(passes.outputs(source.read(start, start + 1)).to(kept), kept):
            raise Mismatch(
                f"{store.path} was built from another request (function: outputs of example {start} changed); give the "
                "same module, choose another folder (out=), or start anew with overwrite=True"
            )

"""Builds the store of a PyTorch module's per-example Jacobian, resumable; needs the extra `torch`.

    import jacstore.torch

    store = jacstore.torch.build(module.eval(), x, "run.jac", memory="8GB")

Parameters that are multiplied by linear, convolution or embedding calls give factors, all others give rows by
`torch.func`, in one pass: the VJP of one example, mapped over outputs and over examples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

try:
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"jacstore.torch needs PyTorch ({error}): pip install 'jacstore[torch]'") from error

from jacstore.base.budget import Budget
from jacstore.base.events import BatchDone, Listener, Started, silent
from jacstore.base.machine import format_size
from jacstore.errors import InvalidFunctionError, InvalidRequestError, RequestMismatchError, RunInterruptedError
from jacstore.problem.inputs import Arrays, Dataset, Examples, Range, is_dataset, is_table
from jacstore.problem.torch_problem import TorchProblem
from jacstore.rows.options import BuildOptions
from jacstore.rows.reports import TorchBuildReport
from jacstore.rows.torch.audit import Audit, Differs
from jacstore.rows.torch.choose_terms import WRONG
from jacstore.rows.torch.device_pass import STEPS, TorchPass
from jacstore.rows.torch.network import Network, close, host, mapped, path_of, requested, settings
from jacstore.rows.unit import SpareBlocks, Unit, refuse_other_inputs
from jacstore.storage import zarr_group
from jacstore.storage.files import Memory
from jacstore.storage.runs import keep_run
from jacstore.store.codec_choice import fastest_codec, measured_disk_speed
from jacstore.store.reader import JacobianStore
from jacstore.store.writer import StoreWriter

# Examples whose rows are encoded to choose a codec.
CODEC_EXAMPLES = 4


def build(
    module: torch.nn.Module | TorchProblem,
    inputs: Any = None,
    out: str | Path | None = None,
    *,
    outputs: str | Sequence[int] = "all",
    memory: int | str | None = None,
    device_memory: int | str | None = None,
    dtype: str = "float32",
    layout: str = "auto",
    batch_size: int | None = None,
    output_batch: int | None = None,
    unit_size: int | None = None,
    codec: str = "auto",
    examples: tuple[int, int] | str | None = None,
    part: tuple[int, int] | str | None = None,
    devices: str | int | Sequence[int] | None = None,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    listener: Listener = silent,
    stop: Callable[[], bool] | None = None,
) -> JacobianStore:
    """Compute the per-example Jacobian of a module once and store it; a rerun computes only what is missing.

    Parameters
    ----------
    module
        In evaluation mode; or a `TorchProblem`, which holds inputs and outputs too. Columns are its parameters that
        require a gradient, in the order of `named_parameters`.
    inputs
        Tensors or arrays `(N, ...)`, or a map-style dataset; a tuple is passed as arguments, a dict as keywords.
        Floating inputs are given in the type of the module's first parameter.
    outputs
        "all", "sum" (gradient of the summed outputs) or indices into the flattened outputs of one example.
    device_memory
        Bytes that a device pass may take where the module's first parameter is; if not given, three quarters of what
        is free on a GPU, and a quarter of `memory` on a CPU.
    out, memory, dtype, layout, batch_size, output_batch, unit_size, codec
        As for `jacstore.build`.
    devices
        Has to be left out: a module computes on the device of its first parameter.
    examples, part, allow_nonfinite, overwrite, listener, stop
        As for `jacstore.build`.

    Returns
    -------
    JacobianStore
        With `.report`; `report["vmap"]` is false where the module cannot be mapped over examples (packed sequences, for
        instance) and they were taken one at a time; `report["seconds_start"]` is what each step before the first batch
        took.

    Raises
    ------
    InvalidRequestError
        For anything that the caller must change; nothing finished is lost.
    """
    started = time.perf_counter()
    options = BuildOptions.among(locals())
    if options.devices is not None:
        raise InvalidRequestError(
            "--devices: a module of PyTorch computes where its first parameter is; leave it out (devices=) and move "
            "the module, such as module.to('cuda:1')"
        )
    problem = _problem_of(module, inputs, outputs)
    source = source_of(problem.inputs)
    if source.n_examples == 0:
        raise InvalidRequestError("inputs holds 0 examples; at least 1 is needed; change inputs=")
    chosen = Range(source, *options.range_of(source.n_examples))
    with settings():
        return _Job(problem, chosen, out, options).run(started, listener, stop or (lambda: False))


def _problem_of(module: Any, inputs: Any, outputs: Any) -> TorchProblem:
    """What is given, as one value."""
    if isinstance(module, TorchProblem):
        if inputs is not None or outputs != "all":
            raise InvalidRequestError(
                "module is a TorchProblem, which holds inputs and outputs; leave out inputs= and outputs="
            )
        return module
    if inputs is None:
        raise InvalidRequestError("inputs is missing; give the examples of the module (inputs=), or a TorchProblem")
    return TorchProblem(module=module, inputs=inputs, outputs=outputs)


class _Job:
    """One build: the module, its examples and what is decided for it."""

    def __init__(self, problem: TorchProblem, source: Range, out: str | Path | None, options: BuildOptions) -> None:
        self.source, self.out, self.options = source, out, options
        self.network = Network(problem.module, problem.outputs, options.float64)
        self.found = None if options.overwrite else _existing(out, options.memory)
        # How the pass is made; terms that turn out to be wrong are left out of it.
        leaves = self.found.leaves if self.found else ()
        self.found_wrong: dict[str, Any] = {"wrong": {leaf.path for leaf in leaves if leaf.why == WRONG}}

    def run(self, started: float, listener: Listener, stop: Callable[[], bool]) -> JacobianStore:
        """Compute what is missing, from the beginning again where terms are found to be wrong."""
        seconds = dict.fromkeys(STEPS, 0.0)
        while True:
            passes = TorchPass(self.network, self.source, self.options, **self.found_wrong)
            seconds = {step: taken + passes.seconds[step] for step, taken in seconds.items()}
            writer = self._writer(passes, listener, stop)
            _give_memory(writer, passes, self.source, self.options.memory)
            try:
                with writer:
                    listener(Started(what="units", total=len(writer.units), done=writer.reused))
                    _refuse_other_results(writer, passes, self.source, self.options.memory)
                    times = _run(writer, passes, self.source, listener, stop)
                break
            except Differs as differs:
                self.found_wrong |= _otherwise(differs, passes, writer, self.options.part)
                self.options, self.found = replace(self.options, overwrite=True), None
        store = writer.store
        store.built = TorchBuildReport.of(
            writer,
            started,
            **times,
            seconds_start=seconds,
            batch_size=passes.batch_size,
            batches_by_device=[],
            vmap=passes.mapped,
        )
        if store.built.units_computed:
            keep_run(store.ledger, "build", {**store.report, "memory": self.options.memory})
        return store

    def _writer(self, passes: TorchPass, listener: Listener, stop: Callable[[], bool]) -> StoreWriter:
        options, network = self.options, self.network
        return StoreWriter(
            self.out,
            passes.cut.leaves,
            self.source.n_examples,
            passes.n_outputs,
            operands=passes.cut.operands,
            dtype=options.dtype,
            codec=self.found.choices.codec if self.found else self._codec(passes),
            unit_size=options.unit_size,
            memory=options.memory,
            outputs_dtype="float64" if options.float64 else "float32",
            requested=self._requested(),
            numerics={"lowest": str(network.lowest).removeprefix("torch.")},
            left_out=network.left_out,
            part=options.part,
            allow_nonfinite=options.allow_nonfinite,
            overwrite=options.overwrite,
            listener=listener,
            stop=stop,
        )

    def _requested(self) -> dict[str, Any]:
        """What decides the rows; in the words of the store that is continued, if an earlier version began it."""
        options, first = self.options, self.source.first
        wanted: dict[str, Any] = {
            **requested(self.network, self.source.read(0, 1)),
            "examples": [first, first + self.source.n_examples],
            "layout": options.layout,
            "codec": options.codec,
        }
        if self.found is not None:
            # Such a store is about the first examples, without compression.
            usual = {"examples": [0, self.source.n_examples], "codec": "none" if options.codec == "none" else "auto"}
            for name, value in usual.items():
                if name not in self.found.requested and wanted[name] == value:
                    del wanted[name]
        return wanted

    def _codec(self, passes: TorchPass) -> str:
        """The codec of a new store; `auto` encodes rows of a few examples."""
        out = "memory://" if self.out is None else str(self.out)
        if self.options.codec != "auto" or out == "memory://":
            return self.options.codec if self.options.codec != "auto" else "none"
        examples = self.source.read(0, min(CODEC_EXAMPLES, passes.batch_size, self.source.n_examples))
        began = time.perf_counter()
        rows = next(passes.run(examples))
        seconds = time.perf_counter() - began
        sample = [*rows.rows, *(v.reshape(len(v), 1, -1) for v in rows.factors.values() if v.dtype.kind != "i")]
        size = sum(values.nbytes for values in [*rows.rows, *rows.factors.values()])
        computing = seconds / size if passes.network.device.type == "cpu" else 0.0
        return fastest_codec(sample, measured_disk_speed(out), computing)


# --------------------------------------------------------------------------------------------------------------- inputs


class _OnHost:
    """A tensor read as NumPy arrays, from whatever device and type."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape = tensor.detach(), tuple(tensor.shape)

    def __getitem__(self, index: slice) -> np.ndarray:
        return host(self.tensor[index])


class _Items:
    """A dataset whose items may hold tensors."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return mapped(lambda leaf: host(leaf) if isinstance(leaf, torch.Tensor) else leaf, self.items[index])


def source_of(inputs: Any) -> Arrays | Dataset:
    """A source of examples as NumPy arrays, whatever holds them."""
    if is_table(inputs):
        return Dataset(inputs)  # gives NumPy arrays itself
    if is_dataset(inputs):
        return Dataset(_Items(inputs))
    return Arrays(mapped(lambda leaf: _OnHost(leaf) if isinstance(leaf, torch.Tensor) else leaf, inputs))


# ------------------------------------------------------------------------------------------------------------- the loop


def _existing(out: str | Path | None, memory: int) -> JacobianStore | None:
    """The store to continue, if there is one: its codec stays, and so do leaves whose terms an example refuted."""
    files = zarr_group.place(out, memory)
    if files.address is None or files.size(zarr_group.ROOT) is None:
        return None
    return JacobianStore(files, str(out))


def _otherwise(found: Differs, passes: TorchPass, writer: StoreWriter, part: tuple[int, int]) -> dict[str, Any]:
    """How to start over after terms were found wrong, as long as nothing is stored with them."""
    generic = found.names & set(passes.cut.generic)
    if generic and not passes.mapped:
        passes.refuse_generic(generic, found.example)
    if part != (1, 1) or writer.store.ledger.done("unit"):
        raise InvalidFunctionError(
            f"parameter {min(found.names)!r} is used otherwise by example {found.example} than by those that are "
            "stored; store its rows, which autograd gives one example at a time: --layout dense --overwrite "
            "(layout='dense', overwrite=True)"
        )
    return {
        "wrong": {path_of(name) for name in (*passes.wrong, *(found.names - generic))},
        "mapped_over": passes.mapped and not generic,
    }


def _run(
    writer: StoreWriter,
    passes: TorchPass,
    source: Examples,
    listener: Listener,
    stop: Callable[[], bool],
) -> dict[str, Any]:
    """Compute and write the missing units, one being written while the next is filled."""
    times: dict[str, Any] = {"seconds_device": 0.0, "seconds_write": 0.0}
    spare = SpareBlocks(writer, min(2, len(writer.missing)))
    writing: Future[float] | None = None
    stopped, audit = False, Audit(passes)
    with ThreadPoolExecutor(1, "jacstore-unit") as pool:
        for start, last in writer.missing:
            unit = Unit(writer, start, last, "float64" if writer.dtype == "float64" else "float32", spare)
            audit.begin_unit(start, last)
            for a in range(start, last, passes.batch_size):
                stopped = stop()
                if stopped:
                    break
                b = min(a + passes.batch_size, last)
                if b == last and writing:
                    # Of complete units one at most is not stored yet, so that a kill loses no more.
                    times["seconds_write"] += writing.result()
                    writing = None
                began = time.perf_counter()
                examples = source.read(a, b)
                for rows in audit.compute(a, examples, b - a):
                    unit.fill(a, rows)
                unit.inputs.update(examples)
                listener(BatchDone(examples=b - a))
                times["seconds_device"] += time.perf_counter() - began
            if stopped:
                break
            writing = pool.submit(unit.write)
        times["seconds_write"] += writing.result() if writing else 0.0
    if stopped:
        raise RunInterruptedError(
            f"interrupted; finished work is kept, {len(writer.missing)} of {len(writer.units)} units missing"
        )
    return {**times, "seconds_audit": audit.seconds, "examples_audited": audit.examples}


def _give_memory(writer: StoreWriter, passes: TorchPass, source: Examples, memory: int) -> None:
    """Give what is left of the memory to a store in RAM; refuse where what is needed at once does not fit."""
    if not writer.missing:
        return
    store, (each, chunks) = writer.store, source.bytes_held()
    unit = store.bytes_decoded // store.n_examples * store.unit_size
    needs = {
        # One is filled while the other is written; objects in a bucket are put from copies.
        "unit_buffers": (2 + bool(writer.files.address and writer.files.copies)) * unit,
        # On an accelerator passes take its memory, not the host's.
        "device_pass": passes.bytes_needed if passes.network.device.type == "cpu" else 0,
        # A batch as it is read and as tensors.
        "inputs": chunks + 2 * each * passes.batch_size,
    }
    left = Budget(memory).beside(**needs)
    if left < writer.files.bytes_held:
        raise InvalidRequestError(
            f"--memory {memory:,}: units of {store.unit_size} example(s) take {format_size(needs['unit_buffers'])} "
            f"(unit_buffers), a batch of {passes.batch_size} about {format_size(needs['device_pass'])} (device_pass) "
            f"and its inputs {format_size(needs['inputs'])} (inputs); give more memory (memory=), a smaller "
            "--batch-size (batch_size=) or --unit-size (unit_size=), or inputs= in smaller chunks"
        )
    if isinstance(writer.files, Memory):
        # Files are copied from a unit, up to all of it at once.
        writer.files.limit = max(writer.files.bytes_held, left - unit)


def _refuse_other_results(writer: StoreWriter, passes: TorchPass, source: Examples, budget: int) -> None:
    """Refuse other inputs, or other outputs at the same inputs, than those that finished units were made from.

    The fingerprint of a module does not cover all that it computes, so some finished outputs are recomputed.
    """
    store = writer.store
    for unit in refuse_other_inputs(writer, source.read, source.bytes_held(), budget):
        start, _ = store.unit_range(unit)
        kept = torch.from_numpy(store.outputs[start])
        if not close(passes.outputs(source.read(start, start + 1)).to(kept), kept, passes.network.lowest):
            raise RequestMismatchError(
                f"{store.path} was built from another request (function: outputs of example {start} changed); give the "
                "same module, choose another folder (--out, out=), or start over with --overwrite (overwrite=True)"
            )

"""Build the store of a PyTorch module's per-example Jacobians; needs the extra `torch`.

    import jacstore.torch

    store = jacstore.torch.build(module.eval(), x, "run.jac", memory="8GB")

Parameters that are multiplied by linear, convolution or embedding calls give factors, all others give rows by
`torch.func`, in one pass: the VJP of one example, mapped over outputs and over examples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

try:
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"jacstore.torch needs PyTorch ({error}): pip install 'jacstore[torch]'") from error

from jacstore.base import machine
from jacstore.base.events import BatchDone, Listener, Started, silent
from jacstore.base.machine import format_size
from jacstore.errors import InvalidFunctionError, InvalidRequestError, RequestMismatchError, RunInterruptedError
from jacstore.problem.inputs import Arrays, Dataset, is_dataset, is_table
from jacstore.problem.torch_problem import TorchProblem
from jacstore.rows.build import LAYOUTS
from jacstore.rows.torch.audit import Audit, Differs
from jacstore.rows.torch.choose_terms import WRONG
from jacstore.rows.torch.device_pass import STEPS, TorchPass
from jacstore.rows.torch.network import Network, close, host, mapped, path_of, requested, settings
from jacstore.rows.unit import SpareBlocks, Unit, refuse_other_inputs
from jacstore.storage import zarr_group
from jacstore.storage.files import Folder
from jacstore.store.metadata import DTYPES
from jacstore.store.reader import JacobianStore
from jacstore.store.writer import StoreWriter


def build(
    module: torch.nn.Module | TorchProblem,
    inputs: Any = None,
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
        In evaluation mode; or a `TorchProblem`, which holds inputs and outputs too. Columns are its parameters that
        require a gradient, in the order of `named_parameters`.
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
        With `.report`; `report["vmap"]` is false where the module cannot be mapped over examples (packed sequences, for
        instance) and they were taken one at a time; `report["seconds_start"]` is what each step before the first batch
        took.

    Raises
    ------
    InvalidRequestError
        For anything that the caller must change; nothing finished is lost.
    """
    started = time.perf_counter()
    for name, given, allowed in (("dtype", dtype, DTYPES), ("layout", layout, LAYOUTS)):
        if given not in allowed:
            raise InvalidRequestError(f"{name}={given}: allowed are {', '.join(allowed)}")
    if isinstance(module, TorchProblem):
        if inputs is not None or outputs != "all":
            raise InvalidRequestError(
                "module is a TorchProblem, which holds inputs and outputs; leave out inputs= and outputs="
            )
        inputs, outputs, network_of = module.inputs, module.outputs, module.module
    elif inputs is None:
        raise InvalidRequestError("inputs is missing; give the examples of the module (inputs=), or a TorchProblem")
    else:
        network_of = module
    source = source_of(inputs)
    if source.n_examples == 0:
        raise InvalidRequestError("inputs holds 0 examples; at least 1 is needed; change inputs=")
    budget = machine.default_memory(memory)
    options: dict[str, Any] = {
        "layout": layout,
        "budget": budget,
        "batch_size": zarr_group.parse_count(batch_size, "--batch-size"),
        "wrong": set() if overwrite else _known_wrong(out, budget),
    }
    of_part = zarr_group.parse_part(part)
    seconds = dict.fromkeys(STEPS, 0.0)
    with settings():
        network = Network(network_of, outputs, dtype == "float64")
        while True:
            passes = TorchPass(network, source, **options)
            seconds = {step: taken + passes.seconds[step] for step, taken in seconds.items()}
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
                numerics={"lowest": str(network.lowest).removeprefix("torch.")},
                left_out=network.left_out,
                part=of_part,
                allow_nonfinite=allow_nonfinite,
                overwrite=overwrite,
                listener=listener,
                stop=stop,
            )
            _refuse_small_memory(writer, passes, budget)
            try:
                with writer:
                    listener(Started(what="units", total=len(writer.units), done=writer.reused))
                    _refuse_other_results(writer, passes, source)
                    times = _run(writer, passes, source, listener, stop)
                break
            except Differs as found:
                options |= _otherwise(found, passes, writer, of_part)
                overwrite = True
    store = writer.store
    store.report = writer.report(
        started, **times, seconds_start=seconds, batch_size=passes.batch_size, vmap=passes.mapped
    )
    return store


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


def _known_wrong(out: str | Path | None, budget: int) -> set[str]:
    """Leaves of a begun store that are stored as rows because an example showed their terms to be wrong."""
    files = zarr_group.place(out, budget)
    if not isinstance(files, Folder) or files.size(zarr_group.ROOT) is None:
        return set()
    return {leaf.path for leaf in JacobianStore(files, str(out)).leaves if leaf.why == WRONG}


def _otherwise(found: Differs, passes: TorchPass, writer: StoreWriter, part: tuple[int, int]) -> dict[str, Any]:
    """How to start over after terms were found wrong, as long as nothing is stored with them."""
    generic = found.names & set(passes.cut.generic)
    if generic and not passes.mapped:
        passes.refuse_generic(generic, found.example)
    if part != (1, 1) or writer.store.ledger.done("unit"):
        raise InvalidFunctionError(
            f"parameter {min(found.names)!r} is used otherwise by example {found.example} than by those that are "
            "stored; store its rows, which autograd gives one example at a time: layout='dense' with overwrite=True"
        )
    return {
        "wrong": {path_of(name) for name in (*passes.wrong, *(found.names - generic))},
        "mapped_over": passes.mapped and not generic,
    }


def _run(
    writer: StoreWriter,
    passes: TorchPass,
    source: Arrays | Dataset,
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


def _refuse_small_memory(writer: StoreWriter, passes: TorchPass, budget: int) -> None:
    store = writer.store
    units = 2 * (store.bytes_decoded // store.n_examples * store.unit_size)
    on_host = passes.bytes_needed if passes.network.device.type == "cpu" else 0
    if writer.missing and units + on_host > budget - writer.files.bytes_held:
        raise InvalidRequestError(
            f"memory={budget:,}: two units of {store.unit_size} example(s) take {format_size(units)} and a batch of "
            f"{passes.batch_size} about {format_size(on_host)}; give more memory (memory=), a smaller batch_size= or "
            "unit_size="
        )


def _refuse_other_results(writer: StoreWriter, passes: TorchPass, source: Arrays | Dataset) -> None:
    """Refuse other inputs, or other outputs at the same inputs, than those that finished units were made from.

    The fingerprint of a module does not cover all that it computes, so some finished outputs are recomputed.
    """
    store = writer.store
    for unit in refuse_other_inputs(writer, source.read):
        start, _ = store.unit_range(unit)
        kept = torch.from_numpy(store.outputs[start])
        if not close(passes.outputs(source.read(start, start + 1)).to(kept), kept, passes.network.lowest):
            raise RequestMismatchError(
                f"{store.path} was built from another request (function: outputs of example {start} changed); give the "
                "same module, choose another folder (out=), or start over with overwrite=True"
            )

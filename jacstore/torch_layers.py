"""In: a network in torch and an example. Out: its layers as they are called, and the operands that they store.

Hooks on Linear, Conv1d to Conv3d and Embedding keep what goes in and add a zero to what comes out: the cotangent of
that zero is the layer's, whatever is done in place afterwards. A parameter that is used anywhere else than by its
layers' calls (the edges into it are counted in autograd's graph) has no terms and is stored as rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from jacstore.errors import Refused
from jacstore.terms import Conv, Dot, Factored, Index, Operand
from jacstore.torch_network import Network

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """A layer that is called `len(outputs)` times for each example.

    Attributes
    ----------
    outputs
        Zeros shaped as what each call returned, with a batch axis of one.
    inputs, cotangents
        The operands that all its calls together are stored as; layers that see the same tensors share `inputs`.
    """

    name: str
    module: Any
    outputs: tuple[torch.Tensor, ...]
    inputs: Operand
    cotangents: Operand

    def term(self, bias: bool) -> Factored:
        """Its part of the weight's or the bias's row."""
        common: dict[str, Any] = {"cotangents": self.cotangents.name, "scale": 1.0}
        width, module = self.cotangents.shape[-1], self.module
        if bias:
            return Dot(inputs=None, views=(), **common)
        if isinstance(module, nn.Linear):
            channels = self.inputs.shape[-1]
            views = (("reshape", (channels, width)), ("transpose", (1, 0)))
            return Dot(inputs=self.inputs.name, views=views, **common)
        if isinstance(module, nn.Embedding):
            return Index(ids=self.inputs.name, views=(), size=module.num_embeddings, **common)
        space = len(module.kernel_size)
        # From jacstore's `(*window, channels / groups, width)` to torch's `(width, channels / groups, *window)`.
        shape = (*module.kernel_size, module.in_channels // module.groups, width)
        return Conv(
            inputs=self.inputs.name,
            views=(("reshape", shape), ("transpose", (space + 1, space, *range(space)))),
            window=tuple(module.kernel_size),
            positions=tuple(self.outputs[0].shape[-space:]),
            strides=tuple(module.stride),
            dilation=tuple(module.dilation),
            padding=_low_padding(module),
            spread=(1,) * space,
            groups=module.groups,
            **common,
        )

    def as_inputs(self, given: Sequence[torch.Tensor]) -> torch.Tensor:
        """What went into all calls in the operand's form: positions one call after the other."""
        return _as_inputs(self.module, given)

    def as_cotangents(self, given: Sequence[torch.Tensor]) -> torch.Tensor:
        """Cotangents of all calls as `(1, T, D)`."""
        return _as_cotangents(self.module, given)


def _as_cotangents(module: Any, given: Sequence[torch.Tensor]) -> torch.Tensor:
    if isinstance(module, CONVOLUTIONS):
        given = [d.movedim(-1 - len(module.kernel_size), -1) for d in given]
    parts = [d.reshape(-1, d.shape[-1]) for d in given]
    return (torch.cat(parts) if len(parts) > 1 else parts[0])[None]


def _as_inputs(module: Any, given: Sequence[torch.Tensor]) -> torch.Tensor:
    if isinstance(module, nn.Embedding):
        ids = torch.cat([x.reshape(-1) for x in given]).to(torch.int32)
        # Torch gives the padding's row no gradient.
        return ids if module.padding_idx is None else torch.where(ids == module.padding_idx, -1, ids)
    if isinstance(module, nn.Linear):
        parts = [x.reshape(-1, x.shape[-1]) for x in given]
        return (torch.cat(parts) if len(parts) > 1 else parts[0])[None]
    space = len(module.kernel_size)
    images = [(x if x.dim() == space + 2 else x[None]).movedim(1, -1) for x in given]
    return torch.cat(images) if len(images) > 1 else images[0]


def _low_padding(module: Any) -> tuple[int, ...]:
    """Zeros before the first pixel of each axis; "same" puts an odd one behind the last."""
    if module.padding == "valid":
        return (0,) * len(module.kernel_size)
    if module.padding == "same":
        return tuple(d * (k - 1) // 2 for d, k in zip(module.dilation, module.kernel_size, strict=True))
    return tuple(module.padding)


# ---------------------------------------------------------------------------------------------------------------- hooks


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """What went into a layer, what it returned, and the node of autograd's graph that made it."""

    given: torch.Tensor
    returned: torch.Tensor
    node: Any


class Taps:
    """Hooks on a network's layers, in place during `running`; `calls` holds what they saw."""

    def __init__(self, network: Network) -> None:
        self.layers = {name: m for name, m in network.module.named_modules() if _is_known(m)}
        self.calls: dict[str, list[Call]] = {}
        self._zeros: Mapping[str, Sequence[torch.Tensor]] | None = None

    @contextmanager
    def running(self, zeros: Mapping[str, Sequence[torch.Tensor]] | None) -> Iterator[None]:
        """For one forward pass: add zeros to what each call of these layers returns; None only records all layers."""
        self.calls, self._zeros = {}, zeros
        handles = [
            self.layers[name].register_forward_hook(partial(self._hook, name), with_kwargs=True)
            for name in (self.layers if zeros is None else zeros)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for name, given in (zeros or {}).items():
            if len(self.calls.get(name, ())) != len(given):
                raise _varies(name)

    def _hook(self, name: str, _: Any, arguments: Any, keywords: Any, output: torch.Tensor) -> torch.Tensor | None:
        made = self.calls.setdefault(name, [])
        given = arguments[0] if arguments else keywords["input"]
        # The node is taken now: an operation in place would put another one there.
        made.append(Call(given=given, returned=output, node=output.grad_fn))
        if self._zeros is None:
            return None
        zeros = self._zeros[name]
        if len(made) > len(zeros) or output.shape != zeros[len(made) - 1].shape:
            raise _varies(name)
        return output + zeros[len(made) - 1]


def _varies(name: str) -> Refused:
    return Refused(
        f"layer {name!r} is called otherwise for one example than for another; layers and shapes may not depend on the "
        "example: pad the inputs, or store its parameters another way; change module="
    )


def _is_known(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.scale_grad_by_freq
    # Lazy layers are of their final class once they have been called.
    return isinstance(module, (nn.Linear, *CONVOLUTIONS)) and getattr(module, "padding_mode", "zeros") == "zeros"


def find_layers(network: Network, taps: Taps, example: Any) -> tuple[tuple[Layer, ...], dict[str, int]]:
    """Layers that are called for one example, and how often each parameter is used outside of them.

    Uses are edges in the graph that autograd builds over `network.selected`, whose tensors have to require a gradient.
    """
    with taps.running(None):
        outputs = network({}, example)
    edges, reached = _edges(outputs)
    names: dict[Any, Operand] = {}
    layers: list[Layer] = []
    outside = {name: edges.get(id(value), 0) for name, value in network.selected.items()}
    for name, calls in taps.calls.items():
        module, inputs = taps.layers[name], [call.given for call in calls]
        if isinstance(module, CONVOLUTIONS) and len({x.shape[-len(module.kernel_size) :] for x in inputs}) > 1:
            continue  # images of different sizes are no one operand
        formed = _as_inputs(module, inputs)
        role = "ids" if isinstance(module, nn.Embedding) else "inputs"
        # Calls hold their inputs, so that these are identities of living tensors.
        key = (tuple(id(x) for x in inputs), tuple(formed.shape), getattr(module, "padding_idx", None))
        zeros = tuple(torch.zeros_like(call.returned).detach() for call in calls)
        cotangents = _as_cotangents(module, zeros)
        layer = Layer(
            name=name,
            module=module,
            outputs=zeros,
            inputs=names.setdefault(key, Operand(name=f"{role}{len(names)}", role=role, shape=tuple(formed.shape))),
            cotangents=Operand(name=f"cotangents{len(layers)}", role="cotangents", shape=tuple(cotangents.shape)),
        )
        layers.append(layer)
        for parameter, _ in parameters_of(network, layer):
            outside[parameter] -= sum(call.node in reached for call in calls)
    return tuple(layers), outside


def _edges(outputs: torch.Tensor) -> tuple[dict[int, int], set[Any]]:
    """Edges into each leaf tensor of autograd's graph, by the tensor's identity, and all inner nodes of the graph."""
    edges: dict[int, int] = {}
    reached, todo = {outputs.grad_fn}, [outputs.grad_fn]
    while todo:
        for node, _ in getattr(todo.pop(), "next_functions", ()):
            variable = getattr(node, "variable", None)
            if variable is not None:
                edges[id(variable)] = edges.get(id(variable), 0) + 1
            elif node is not None and node not in reached:
                reached.add(node)
                todo.append(node)
    return edges, reached


def parameters_of(network: Network, layer: Layer) -> Iterator[tuple[str, bool]]:
    """Names of the selected parameters that are a layer's weight and bias."""
    names = {id(parameter): name for name, parameter in network.module.named_parameters()}
    for kind in ("weight", "bias"):
        name = names.get(id(getattr(layer.module, kind, None)))
        if name in network.selected:
            yield name, kind == "bias"

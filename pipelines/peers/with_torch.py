"""Time the kernel of a network, given as npz, by `torch.func`, as `serve` describes.

Runs where torch 2.13 is installed. The ways are those of PyTorch's tutorial on neural tangent kernels: per-example
Jacobians by `vmap(jacrev)` (or `vmap(grad)`, the output being one number) that are multiplied, and NTK-vector products
by `vjp` and `jvp`. "kept" holds all Jacobians in memory, which the tutorial does not; a product is one `mm` per leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from serve import load, measure, serve
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.nn import functional

Params = dict[str, torch.Tensor]


def mlp(params: Params, x: torch.Tensor) -> torch.Tensor:
    """Summed outputs, one number, of one example `(width,)`."""
    for n in range(len(params) // 2):
        x = functional.linear(functional.relu(x) if n else x, params[f"{n}.weight"], params[f"{n}.bias"])
    return x.sum()


def cnn(params: Params, x: torch.Tensor) -> torch.Tensor:
    """Summed outputs, one number, of one image `(channels, height, width)`."""
    last = len(params) // 2 - 1
    x = x[None]
    for n in range(last):
        x = functional.conv2d(x, params[f"{n}.weight"], params[f"{n}.bias"], padding=1)
        x = functional.max_pool2d(functional.relu(x), 2)
    return functional.linear(x.flatten(), params[f"{last}.weight"], params[f"{last}.bias"]).sum()


def tensors(net: str, layers: dict[str, dict[str, np.ndarray]]) -> Params:
    """Parameters in torch's order of axes: weights `(out, in)`, filters `(out, in, height, width)`."""
    params = {}
    for n, layer in enumerate(layers.values()):
        weight = layer["weight"].T if layer["weight"].ndim == 2 else layer["weight"].transpose(3, 2, 0, 1)
        if net == "cnn" and layer["weight"].ndim == 2:
            # Images were flattened with channels last.
            channels = layers[f"conv{n - 1}"]["bias"].size
            weight = weight.reshape(len(weight), -1, channels).transpose(0, 2, 1).reshape(len(weight), -1)
        params[f"{n}.weight"] = torch.tensor(np.ascontiguousarray(weight))
        params[f"{n}.bias"] = torch.tensor(layer["bias"])
    return params


class Network:
    """Parameters and inputs as tensors."""

    def __init__(self, network: str) -> None:
        net, layers, inputs = load(network)
        self.apply = {"mlp": mlp, "cnn": cnn}[net]
        self.params = tensors(net, layers)
        images = np.ascontiguousarray(inputs.transpose(0, 3, 1, 2)) if inputs.ndim == 4 else inputs
        self.inputs = torch.tensor(images)


class Jacobians(Network):
    """Rows of a block by `vmap`, multiplied leaf by leaf."""

    def __init__(self, network: str, derivative: Callable[..., Any]) -> None:
        super().__init__(network)
        self.jacobian = vmap(derivative(self.apply), (None, 0))

    def rows(self, examples: slice) -> list[torch.Tensor]:
        return [leaf.flatten(1) for leaf in self.jacobian(self.params, self.inputs[examples]).values()]

    def product(self, left: list[torch.Tensor], right: list[torch.Tensor]) -> np.ndarray:
        first, *others = zip(left, right, strict=True)
        total = first[0] @ first[1].T
        for a, b in others:
            total.addmm_(a, b.T)
        return total.numpy()


class VectorProducts(Network):
    """Entries by a `vjp` and a `jvp` each."""

    def rows(self, examples: slice) -> torch.Tensor:
        return self.inputs[examples]

    def product(self, left: torch.Tensor, right: torch.Tensor) -> np.ndarray:
        def entry(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            value, pull = vjp(lambda params: self.apply(params, a), self.params)
            tangents = pull(torch.ones_like(value))[0]
            return jvp(lambda params: self.apply(params, b), (self.params,), (tangents,))[1]

        return vmap(vmap(entry, (None, 0)), (0, None))(left, right).numpy()


WAYS: dict[str, Callable[[str], Any]] = {
    "vmap(grad)": partial(Jacobians, derivative=grad),
    "vmap(jacrev)": partial(Jacobians, derivative=jacrev),
    "vmap(grad) kept": partial(Jacobians, derivative=grad),
    "ntk-vector products": VectorProducts,
}


def prepare(network: str, request: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    tool = WAYS[request["way"]](network)
    few = tool.rows(slice(0, 2))
    tool.product(few, few)
    return partial(measure, tool, len(tool.inputs))


if __name__ == "__main__":
    serve(prepare)

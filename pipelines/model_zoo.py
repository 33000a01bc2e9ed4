"""Model families of other libraries through jacstore: bytes, leaves stored as rows, errors, seconds of each.

    python pipelines/model_zoo.py --models flax_vit,torch_gpt2 --out zoo.csv

Every model has random parameters and inputs and few outputs. Those of JAX are written with flax, equinox and haiku, and
their own per-example Jacobian is `jit(vmap(jacrev))`. Those of PyTorch are built by `jacstore.torch`, beside
`vmap(jacrev)` of `torch.func`, or `torch.autograd.grad` example by example where a module cannot be mapped. GPT-2,
BERT, Llama and T5 are classes of `transformers` with small configurations. ResNet-18, MobileNetV3, ViT and ConvNeXt of
PyTorch are written with torch.nn in the architecture of their papers. A library that is not installed
(`pip install 'jacstore[zoo]'`) leaves its models out.

Leaves set apart are normalisation layers, whose rows are as short as any factor, and early convolutions, whose images
have more numbers than their filters.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jacstore
from common import leave, table, write_csv
from jacstore.base.machine import format_size
from jacstore.testing import dense_rows, row_error

COMPARED = 2  # examples whose rows are compared
ROW_BYTES = 500_000_000  # of a batch of the framework's own rows
NORMS = r"norm|bn|(^|[/._])ln|LayerNorm|BatchNorm|layer_scale"
SHOWN = 6  # leaves stored as rows that are named for a model


@dataclass(frozen=True, kw_only=True)
class Jax:
    """A function of parameters and one example, and inputs `(N, ...)`; `apart` is a pattern of leaves set apart."""

    apply: Callable[[Any, Any], Any]
    params: Any
    inputs: np.ndarray
    apart: str = NORMS


@dataclass(frozen=True, kw_only=True)
class Torch:
    """A module in evaluation mode that gives `(n, K)`, and inputs `(N, ...)`; `apart` as for `Jax`."""

    module: Any
    inputs: Any
    apart: str = NORMS


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is measured of a model; seconds of the framework are those of its own per-example Jacobians."""

    model: str
    examples: int
    outputs: int
    parameters: int
    bytes_stored: int
    bytes_rows: int
    smaller: float
    share_rows: float
    share_rows_apart: float
    largest_error: float
    seconds_build: float
    seconds_compile: float
    seconds_framework: float
    seconds_framework_compile: float


MODELS: dict[str, Callable[[bool], Jax | Torch]] = {}


def model(make: Callable[[bool], Jax | Torch]) -> Callable[[bool], Jax | Torch]:
    """Register a model by the name of its function, which is given whether it is to be tiny."""
    MODELS[make.__name__] = make
    return make


def images(examples: int, size: int, first: bool = False) -> np.ndarray:
    """Normal images `(N, size, size, 3)`, or with channels first."""
    shape = (examples, 3, size, size) if first else (examples, size, size, 3)
    return np.random.default_rng(1).standard_normal(shape, np.float32)


def tokens(examples: int, length: int, vocabulary: int) -> np.ndarray:
    """Random ids `(N, length)`."""
    return np.random.default_rng(1).integers(0, vocabulary, (examples, length), np.int32)


# ---- JAX ----


@model
def flax_resnet18(tiny: bool) -> Jax:
    """ResNet-18 (He et al. 2016, arXiv:1512.03385) in linen, with closed-over statistics of its normalisation."""
    from flax import linen as nn

    width, size, examples = (8, 32, 3) if tiny else (64, 64, 16)
    norm = partial(nn.BatchNorm, use_running_average=True)

    class Block(nn.Module):
        channels: int
        stride: int

        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.Conv(self.channels, (3, 3), self.stride, use_bias=False, name="conv1")(x)
            y = nn.relu(norm(name="bn1")(y))
            y = norm(name="bn2")(nn.Conv(self.channels, (3, 3), use_bias=False, name="conv2")(y))
            if x.shape != y.shape:
                x = nn.Conv(self.channels, (1, 1), self.stride, use_bias=False, name="shortcut")(x)
                x = norm(name="shortcut_bn")(x)
            return nn.relu(x + y)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.relu(norm(name="bn")(nn.Conv(width, (7, 7), 2, use_bias=False, name="stem")(x)))
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
            for stage in range(4):
                for n in range(2):
                    stride = 2 if stage and not n else 1
                    x = Block(width * 2**stage, stride, name=f"stage{stage}_{n}")(x)
            return nn.Dense(2, name="head")(x.mean((1, 2)))

    return of_linen(ResNet(), images(examples, size), f"{NORMS}|stem|stage0")


def of_linen(module: Any, inputs: np.ndarray, apart: str = NORMS) -> Jax:
    """A linen module on batches, its statistics (if any) moved from their first values and closed over."""
    variables = module.init(jax.random.key(0), inputs[:1])
    state = {name: leaf for name, leaf in variables.items() if name != "params"}
    rng = np.random.default_rng(2)
    state = jax.tree.map(lambda leaf: leaf + rng.normal(0, 0.1, leaf.shape).astype(np.float32), state)

    def apply(params: Any, example: Any) -> Any:
        return module.apply({"params": params, **state}, example[None])[0]

    return Jax(apply=apply, params=variables["params"], inputs=inputs, apart=apart)


@model
def flax_vit(tiny: bool) -> Jax:
    """A vision transformer (Dosovitskiy et al. 2021, arXiv:2010.11929) in linen, its tokens pooled by their mean."""
    from flax import linen as nn

    layers, width, examples, size = (1, 48, 3, 16) if tiny else (6, 192, 32, 32)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.LayerNorm(name="norm1")(x)
            x = x + nn.MultiHeadDotProductAttention(3, name="attention")(y)
            y = nn.Dense(4 * width, name="up")(nn.LayerNorm(name="norm2")(x))
            return x + nn.Dense(width, name="down")(nn.gelu(y))

    class ViT(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Conv(width, (8, 8), (8, 8), name="patches")(x).reshape(len(x), -1, width)
            x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
            for n in range(layers):
                x = Block(name=f"block{n}")(x)
            return nn.Dense(2, name="head")(nn.LayerNorm(name="norm")(x).mean(1))

    return of_linen(ViT(), images(examples, size))


@model
def flax_lstm(tiny: bool) -> Jax:
    """An LSTM over sequences, scanned by linen's RNN; the last hidden state gives the outputs."""
    from flax import linen as nn

    width, features, length, examples = (32, 16, 5, 3) if tiny else (256, 64, 32, 32)

    class Recurrent(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            carry = (jnp.zeros((len(x), width), x.dtype),) * 2
            y = nn.RNN(nn.OptimizedLSTMCell(width), name="lstm")(x, initial_carry=carry)
            return nn.Dense(2, name="head")(y[:, -1])

    inputs = np.random.default_rng(1).standard_normal((examples, length, features), np.float32)
    return of_linen(Recurrent(), inputs)


@model
def flax_scanned_layers(tiny: bool) -> Jax:
    """Transformer layers whose parameters are stacked, run by linen's scan."""
    from flax import linen as nn

    layers, width, length, examples = (2, 48, 4, 3) if tiny else (6, 192, 32, 32)
    vocabulary = 50 if tiny else 2000

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            y = nn.LayerNorm(name="norm1")(x)
            x = x + nn.MultiHeadDotProductAttention(3, name="attention")(y, mask=nn.make_causal_mask(x[..., 0]))
            y = nn.Dense(4 * width, name="up")(nn.LayerNorm(name="norm2")(x))
            return x + nn.Dense(width, name="down")(nn.gelu(y)), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, ids: Any) -> Any:
            x = nn.Embed(vocabulary, width, name="table")(ids)
            scanned = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=layers)
            x, _ = scanned(name="layers")(x, None)
            return nn.Dense(2, name="head")(nn.LayerNorm(name="norm")(x).mean(1))

    return of_linen(Stack(), tokens(examples, length, vocabulary))


@model
def nnx_transformer(tiny: bool) -> Jax:
    """A causal transformer of flax nnx modules, split into its parameters and the rest."""
    from flax import nnx

    layers, width, length, examples = (1, 48, 4, 3) if tiny else (4, 192, 32, 32)
    vocabulary = 50 if tiny else 2000
    rngs = nnx.Rngs(0)

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(3, width, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    class Transformer(nnx.Module):
        def __init__(self) -> None:
            self.table = nnx.Embed(vocabulary, width, rngs=rngs)
            self.blocks = nnx.List([Block() for _ in range(layers)])
            self.norm, self.head = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, 2, rngs=rngs)

        def __call__(self, ids: Any) -> Any:
            x = self.table(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x).mean(-2))

    graph, params, rest = nnx.split(Transformer(), nnx.Param, ...)

    def apply(params: Any, ids: Any) -> Any:
        return nnx.merge(graph, params, rest)(ids[None])[0]

    return Jax(apply=apply, params=params, inputs=tokens(examples, length, vocabulary))


@model
def equinox_cnn(tiny: bool) -> Jax:
    """Convolutions, pooling and an MLP of equinox modules, parted into arrays and the rest."""
    import equinox as eqx

    channels, examples, size = ((3, 8, 16), 3, 16) if tiny else ((3, 32, 64, 128), 32, 32)
    keys = iter(jax.random.split(jax.random.key(0), 8))
    convs = [eqx.nn.Conv2d(a, b, 3, padding=1, key=next(keys)) for a, b in itertools.pairwise(channels)]
    layers: list[Any] = []
    for conv in convs:
        layers += [conv, eqx.nn.Lambda(jax.nn.relu), eqx.nn.MaxPool2d(2, 2)]
    side = size // 2 ** len(convs)
    mlp = eqx.nn.MLP(channels[-1] * side**2, 2, 2 * channels[-1], 2, key=next(keys))
    network = eqx.nn.Sequential([*layers, eqx.nn.Lambda(jnp.ravel), mlp])
    params, rest = eqx.partition(network, eqx.is_inexact_array)

    def apply(params: Any, image: Any) -> Any:
        return eqx.combine(params, rest)(image)

    return Jax(apply=apply, params=params, inputs=images(examples, size, first=True), apart=rf"{NORMS}|^layers/[03]/")


@model
def haiku_mlp(tiny: bool) -> Jax:
    """An MLP of haiku with layer normalisation."""
    widths, examples = ((32, 32, 2), 3) if tiny else ((1024, 1024, 512, 2), 64)

    def network(x: Any) -> Any:
        import haiku as hk

        for width in widths[:-1]:
            x = jax.nn.gelu(hk.LayerNorm(-1, True, True)(hk.Linear(width)(x)))
        return hk.Linear(widths[-1])(x)

    return of_haiku(network, np.random.default_rng(1).standard_normal((examples, 784), np.float32))


@model
def haiku_cnn(tiny: bool) -> Jax:
    """Convolutions of haiku, one of them depthwise, and a dense layer."""
    width, examples, size = (8, 3, 8) if tiny else (64, 16, 16)

    def network(x: Any) -> Any:
        import haiku as hk

        x = jax.nn.relu(hk.Conv2D(width, 3, 2)(x))
        x = jax.nn.relu(hk.DepthwiseConv2D(1, 3)(x))
        x = jax.nn.relu(hk.Conv2D(2 * width, 1)(x))
        x = jax.nn.relu(hk.Conv2D(4 * width, 3, 4)(x))
        return hk.Linear(2)(jax.nn.relu(hk.Linear(4 * width)(x.reshape(len(x), -1))))

    return of_haiku(network, images(examples, size), rf"{NORMS}|conv2_d/|depthwise")


def of_haiku(network: Callable[[Any], Any], inputs: np.ndarray, apart: str = NORMS) -> Jax:
    """A function of haiku modules on batches."""
    import haiku as hk

    transformed = hk.without_apply_rng(hk.transform(network))
    params = transformed.init(jax.random.key(0), inputs[:1])
    return Jax(apply=lambda p, x: transformed.apply(p, x[None])[0], params=params, inputs=inputs, apart=apart)


# ---- PyTorch ----


def of_torch(module: Any, inputs: np.ndarray, apart: str = NORMS) -> Torch:
    """A module in evaluation mode, statistics of its normalisation moved from their first values."""
    import torch

    for layer in module.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1)
            layer.running_var.uniform_(0.5, 2)
    return Torch(module=module.eval(), inputs=torch.from_numpy(inputs), apart=apart)


def conv_norm(a: int, b: int, size: int, stride: int = 1, groups: int = 1) -> Any:
    """A convolution without bias and its normalisation."""
    from torch import nn

    layers = nn.Sequential()
    layers.add_module("conv", nn.Conv2d(a, b, size, stride, size // 2, groups=groups, bias=False))
    layers.add_module("bn", nn.BatchNorm2d(b))
    return layers


def residual(body: Any, shortcut: Any = None, after: Any = None) -> Any:
    """`after(shortcut(x) + body(x))` as a module."""
    from torch import nn

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.shortcut, self.after = body, shortcut or nn.Identity(), after or nn.Identity()

        def forward(self, x: Any) -> Any:
            return self.after(self.shortcut(x) + self.body(x))

    return Residual()


@model
def torch_resnet18(tiny: bool) -> Torch:
    """ResNet-18 (He et al. 2016, arXiv:1512.03385)."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    width, size, examples = (8, 32, 3) if tiny else (64, 64, 16)
    stem = nn.Sequential(conv_norm(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    stages, before = nn.Sequential(), width
    for stage in range(4):
        for n in range(2):
            after, stride = width * 2**stage, 2 if stage and not n else 1
            body = nn.Sequential(conv_norm(before, after, 3, stride), nn.ReLU(), conv_norm(after, after, 3))
            shortcut = conv_norm(before, after, 1, stride) if before != after else None
            stages.add_module(f"stage{stage}_{n}", residual(body, shortcut, nn.ReLU()))
            before = after
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 2))
    return of_torch(nn.Sequential(stem, stages, head), images(examples, size, True), rf"{NORMS}|^0/|stage0")


# Kernel, channels inside and out, squeeze, hard swish, stride: table 2 of Howard et al. 2019.
MOBILE = (
    (3, 16, 16, True, False, 2),
    (3, 72, 24, False, False, 2),
    (3, 88, 24, False, False, 1),
    (5, 96, 40, True, True, 2),
    (5, 240, 40, True, True, 1),
    (5, 240, 40, True, True, 1),
    (5, 120, 48, True, True, 1),
    (5, 144, 48, True, True, 1),
    (5, 288, 96, True, True, 2),
    (5, 576, 96, True, True, 1),
    (5, 576, 96, True, True, 1),
)


@model
def torch_mobilenet_v3_small(tiny: bool) -> Torch:
    """MobileNetV3-Small (Howard et al. 2019, arXiv:1905.02244)."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks, size, examples = (MOBILE[:4], 32, 3) if tiny else (MOBILE, 96, 16)

    class Squeeze(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            inner = max(8, (channels // 4 + 4) // 8 * 8)
            self.down, self.up = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)

        def forward(self, x: Any) -> Any:
            gate = self.up(nn.functional.relu(self.down(x.mean((2, 3), keepdim=True))))
            return x * nn.functional.hardsigmoid(gate)

    layers, before = [conv_norm(3, 16, 3, 2), nn.Hardswish()], 16
    for kernel, inner, after, squeeze, swish, stride in blocks:
        act = nn.Hardswish if swish else nn.ReLU
        parts = [conv_norm(before, inner, 1), act()] if inner != before else []
        parts += [conv_norm(inner, inner, kernel, stride, groups=inner), act()]
        parts += [Squeeze(inner)] if squeeze else []
        body = nn.Sequential(*parts, conv_norm(inner, after, 1))
        layers.append(residual(body) if stride == 1 and before == after else body)
        before = after
    last, hidden = (6 * before, 64) if tiny else (576, 1024)
    layers += [conv_norm(before, last, 1), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    layers += [nn.Linear(last, hidden), nn.Hardswish(), nn.Linear(hidden, 2)]
    return of_torch(nn.Sequential(*layers), images(examples, size, True), rf"{NORMS}|^[0-5]/")


@model
def torch_vit_tiny(tiny: bool) -> Torch:
    """A vision transformer of the tiny width, with a class token (Dosovitskiy et al. 2021, arXiv:2010.11929)."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers, width, size, examples = (1, 48, 16, 3) if tiny else (6, 192, 32, 16)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.heads = nn.LayerNorm(width), nn.MultiheadAttention(width, 3, batch_first=True)

        def forward(self, x: Any) -> Any:
            x = self.norm(x)
            return self.heads(x, x, x, need_weights=False)[0]

    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, width, 8, 8)
            self.token = nn.Parameter(torch.zeros(1, 1, width))
            self.positions = nn.Parameter(0.02 * torch.randn(1, (size // 8) ** 2 + 1, width))
            blocks = []
            for _ in range(layers):
                up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
                wide = nn.Sequential()
                for name, part in (("norm", nn.LayerNorm(width)), ("up", up), ("act", nn.GELU()), ("down", down)):
                    wide.add_module(name, part)
                blocks += [residual(Attention()), residual(wide)]
            self.blocks, self.norm, self.head = nn.Sequential(*blocks), nn.LayerNorm(width), nn.Linear(width, 2)

        def forward(self, x: Any) -> Any:
            x = self.patches(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
            return self.head(self.norm(self.blocks(x))[:, 0])

    return of_torch(ViT(), images(examples, size, True))


@model
def torch_convnext(tiny: bool) -> Torch:
    """A small ConvNeXt: depthwise 7 x 7, two dense layers, a scale, residual (Liu et al. 2022, arXiv:2201.03545)."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    widths, depths, size, examples = ((16, 32), (1, 1), 32, 3) if tiny else ((48, 96, 192, 384), (1, 1, 3, 1), 64, 4)

    class Last(nn.LayerNorm):
        def forward(self, x: Any) -> Any:
            return super().forward(x.movedim(1, -1)).movedim(-1, 1)

    class Body(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.depthwise, self.norm = nn.Conv2d(width, width, 7, 1, 3, groups=width), nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.layer_scale = nn.Parameter(torch.rand(width))

        def forward(self, x: Any) -> Any:
            x = self.norm(self.depthwise(x).movedim(1, -1))
            x = self.down(nn.functional.gelu(self.up(x))) * self.layer_scale
            return x.movedim(-1, 1)

    network, stages = nn.Sequential(), nn.Sequential()
    for n, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        stage = nn.Sequential()
        if n:
            stage.add_module("norm", Last(widths[n - 1]))
            stage.add_module("narrow", nn.Conv2d(widths[n - 1], width, 2, 2))
        for k in range(depth):
            stage.add_module(f"block{k}", residual(Body(width)))
        stages.add_module(f"stage{n}", stage)
    for name, part in (("stem", nn.Conv2d(3, widths[0], 4, 4)), ("norm", Last(widths[0])), ("stages", stages)):
        network.add_module(name, part)
    network.add_module("pool", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    network.add_module("head", nn.Linear(widths[-1], 2))
    return of_torch(network, images(examples, size, True), rf"{NORMS}|stem|stage0")


def pooled(body: Any, width: int) -> Any:
    """The hidden states of a model, pooled by their mean, and two outputs of them."""
    from torch import nn

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = body, nn.Linear(width, 2)

        def forward(self, ids: Any) -> Any:
            return self.head(self.body(input_ids=ids).last_hidden_state.mean(1))

    return Pooled()


def likelihood(body: Any) -> Any:
    """The summed log-likelihood of each next token, `(n, 1)`."""
    import torch

    class Likelihood(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def forward(self, ids: Any) -> Any:
            logits = self.body(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
            return logits.gather(2, ids[:, 1:, None].long()).sum((1, 2))[:, None]

    return Likelihood()


@model
def torch_gpt2(tiny: bool) -> Torch:
    """GPT-2 with a tied table; the log-likelihood of each sequence."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    layers, width, length, vocabulary, examples = (1, 48, 4, 80, 3) if tiny else (3, 192, 32, 2000, 8)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=3,
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=0,
    )
    return of_torch(likelihood(GPT2LMHeadModel(config)), tokens(examples, length, vocabulary), rf"{NORMS}|ln_")


@model
def torch_bert(tiny: bool) -> Torch:
    """BERT's encoder, its hidden states pooled by their mean."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    layers, width, length, vocabulary, examples = (1, 48, 4, 80, 3) if tiny else (3, 192, 32, 2000, 8)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=3,
        intermediate_size=4 * width,
        max_position_embeddings=length,
        attn_implementation="eager",
    )
    body = BertModel(config, add_pooling_layer=False)
    return of_torch(pooled(body, width), tokens(examples, length, vocabulary))


@model
def torch_llama(tiny: bool) -> Torch:
    """Llama with grouped queries; the log-likelihood of each sequence."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    layers, width, length, vocabulary, examples = (1, 64, 4, 80, 3) if tiny else (3, 192, 32, 2000, 8)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=0,
    )
    return of_torch(likelihood(LlamaForCausalLM(config)), tokens(examples, length, vocabulary))


@model
def torch_t5_encoder(tiny: bool) -> Torch:
    """T5's encoder, its hidden states pooled by their mean."""
    import torch
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    layers, width, length, vocabulary, examples = (1, 48, 4, 80, 3) if tiny else (3, 192, 32, 2000, 8)
    config = T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // 3,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=3,
    )
    body = T5EncoderModel(config)
    return of_torch(pooled(body, width), tokens(examples, length, vocabulary), rf"{NORMS}|layer_norm")


@model
def torch_lstm(tiny: bool) -> Torch:
    """An LSTM of two layers over words, and a classifier of its last hidden state."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    width, length, vocabulary, examples = (32, 4, 80, 3) if tiny else (256, 32, 2000, 8)

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(vocabulary, width)
            self.lstm = nn.LSTM(width, width, 2, batch_first=True)
            self.head = nn.Linear(width, 2)

        def forward(self, ids: Any) -> Any:
            return self.head(self.lstm(self.table(ids))[0][:, -1])

    return of_torch(Classifier(), tokens(examples, length, vocabulary))


@model
def torch_lora(tiny: bool) -> Torch:
    """Frozen dense layers with low-rank updates (Hu et al. 2022, arXiv:2106.09685): beside one, and added to others."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    width, rank, examples = (64, 4, 3) if tiny else (1024, 8, 64)

    class Adapter(nn.Linear):
        def __init__(self, merged: bool) -> None:
            super().__init__(width, width)
            self.requires_grad_(False)
            self.merged = merged
            self.lora_a = nn.Parameter(torch.randn(rank, width) / width**0.5)
            self.lora_b = nn.Parameter(torch.randn(width, rank) / rank**0.5)

        def forward(self, x: Any) -> Any:
            if self.merged:
                return nn.functional.linear(x, self.weight + 0.5 * self.lora_b @ self.lora_a, self.bias)
            return super().forward(x) + 0.5 * nn.functional.linear(nn.functional.linear(x, self.lora_a), self.lora_b)

    layers = [Adapter(False), nn.ReLU(), Adapter(True), nn.ReLU(), Adapter(True), nn.ReLU(), nn.Linear(width, 2)]
    inputs = np.random.default_rng(1).standard_normal((examples, width), np.float32)
    return of_torch(nn.Sequential(*layers), inputs)


# ---- measuring ----


def measure(name: str, tiny: bool, memory: str, folder: Path) -> tuple[Row, jacstore.JacobianStore]:
    """Build a model's store, its rows by its own framework, and compare them."""
    made = MODELS[name](tiny)
    build, rows = (jax_ways if isinstance(made, Jax) else torch_ways)(made, memory, folder)
    store, truth = build()
    compared = min(COMPARED, store.n_examples) * store.n_outputs
    error = row_error(store.array[:compared].compute(scheduler="synchronous"), truth)
    seconds, seconds_compile = rows(max(1, ROW_BYTES // (4 * store.n_outputs * store.n_parameters)))
    dense = [leaf for leaf in store.leaves if leaf.dense is not None]
    apart = re.compile(made.apart)
    report = store.report
    kept = [leaf for leaf in store.leaves if not apart.search(leaf.path)]
    row = Row(
        model=name,
        examples=store.n_examples,
        outputs=store.n_outputs,
        parameters=store.n_parameters,
        bytes_stored=report["bytes_stored"],
        bytes_rows=report["bytes_dense"],
        smaller=report["bytes_dense"] / report["bytes_stored"],
        share_rows=sum(leaf.size for leaf in dense) / store.n_parameters,
        share_rows_apart=sum(leaf.size for leaf in kept if leaf in dense) / max(1, sum(leaf.size for leaf in kept)),
        largest_error=error,
        seconds_build=report["seconds_total"] - report.get("seconds_compile", 0.0),
        seconds_compile=report.get("seconds_compile", 0.0),
        seconds_framework=seconds,
        seconds_framework_compile=seconds_compile,
    )
    return row, store


Ways = tuple[Callable[[], tuple[jacstore.JacobianStore, np.ndarray]], Callable[[int], tuple[float, float]]]


def jax_ways(made: Jax, memory: str, folder: Path) -> Ways:
    """How to build a store with the rows that it is compared with, and how to time `jit(vmap(jacrev))`."""
    task = jacstore.Problem(apply=made.apply, params=made.params, inputs=made.inputs)

    def build() -> tuple[jacstore.JacobianStore, np.ndarray]:
        store = jacstore.build(task, folder / "store.jac", memory=memory)
        few = jacstore.Problem(apply=made.apply, params=made.params, inputs=made.inputs[:COMPARED])
        return store, dense_rows(few).reshape(-1, store.n_parameters)

    def rows(batch: int) -> tuple[float, float]:
        jacobian = jax.jit(jax.vmap(jax.jacrev(made.apply), (None, 0)))
        began = time.perf_counter()
        for size in {len(part) for part in batches(made.inputs, batch)}:
            jax.block_until_ready(jacobian(made.params, made.inputs[:size]))
        first = time.perf_counter() - began
        began = time.perf_counter()
        for part in batches(made.inputs, batch):
            jax.block_until_ready(jacobian(made.params, part))
        seconds = time.perf_counter() - began
        return seconds, max(0.0, first - seconds)

    return build, rows


def torch_ways(made: Torch, memory: str, folder: Path) -> Ways:
    """The same with `jacstore.torch` and `torch.func`."""
    import torch

    import jacstore.torch

    def build() -> tuple[jacstore.JacobianStore, np.ndarray]:
        # A first run of a few examples loads what torch loads late.
        jacstore.torch.build(made.module, made.inputs[:1], None, memory=memory)
        store = jacstore.torch.build(made.module, made.inputs, folder / "store.jac", memory=memory)
        truth = list(torch_rows(made, torch.float64)(made.inputs[:COMPARED]))
        return store, np.concatenate([part.flatten(0, 1).numpy() for part in truth])

    def rows(batch: int) -> tuple[float, float]:
        jacobian = torch_rows(made, torch.float32)
        for _ in jacobian(made.inputs[:1]):
            pass
        began = time.perf_counter()
        for part in batches(made.inputs, batch):
            for _ in jacobian(part):
                pass
        return time.perf_counter() - began, 0.0

    return build, rows


def batches(inputs: Any, size: int) -> Iterator[Any]:
    """Parts of at most `size` examples."""
    for first in range(0, len(inputs), size):
        yield inputs[first : first + size]


def torch_rows(made: Torch, dtype: Any) -> Callable[[Any], Iterator[Any]]:
    """Rows `(n, K, P)` of a batch by `vmap(jacrev)`; where that fails, of one example at a time by `autograd.grad`."""
    import torch

    module, every = made.module, dict(made.module.named_parameters())
    moving = {name: p.detach().to(dtype) for name, p in every.items() if p.requires_grad}
    fixed = {name: p.detach().to(dtype) for name, p in every.items() if not p.requires_grad}
    fixed |= {name: b.to(dtype) if b.is_floating_point() else b for name, b in module.named_buffers()}

    def outputs(values: Any, example: Any) -> Any:
        given = example.to(dtype) if example.is_floating_point() else example
        return torch.func.functional_call(module, {**values, **fixed}, (given[None],))[0]

    def one(example: Any) -> Any:
        values = {name: p.clone().requires_grad_() for name, p in moving.items()}
        return torch.stack(
            [
                torch.cat(
                    [grad.ravel() for grad in torch.autograd.grad(output, list(values.values()), retain_graph=True)]
                )
                for output in outputs(values, example)
            ]
        )

    mapped = torch.func.vmap(torch.func.jacrev(outputs), (None, 0))

    def rows(batch: Any) -> Iterator[Any]:
        try:
            found = mapped(moving, batch)
        except RuntimeError:
            yield from (one(example)[None] for example in batch)
        else:
            yield torch.cat([part.flatten(2) for part in found.values()], -1)

    return rows


# ---- what is shown ----


def show(rows: list[Row]) -> None:
    """A line for each model."""
    head = ("model", "N", "K", "P", "stored", "rows", "less", "as rows", "apart", "error", "build", "compile", "own")
    lines = [(*head, "compile")]
    for row in rows:
        lines.append(
            (
                row.model,
                f"{row.examples}",
                f"{row.outputs}",
                f"{row.parameters:,}",
                format_size(row.bytes_stored),
                format_size(row.bytes_rows),
                f"{row.smaller:.1f}x",
                f"{row.share_rows:.1%}",
                f"{row.share_rows_apart:.1%}",
                f"{row.largest_error:.1e}",
                f"{row.seconds_build:.2f} s",
                f"{row.seconds_compile:.1f} s",
                f"{row.seconds_framework:.2f} s",
                f"{row.seconds_framework_compile:.1f} s",
            )
        )
    table(
        "Models: share of parameters stored as rows, and without leaves set apart; seconds beside the framework's own",
        lines,
    )


def show_leaves(name: str, store: jacstore.JacobianStore) -> None:
    """The largest leaves that are stored as rows, and why."""
    dense = [leaf for leaf in store.info()["leaves"] if leaf["terms"] == ["dense"]]
    largest = sorted(dense, key=lambda leaf: -leaf["numbers"])[:SHOWN]
    share = {leaf["path"]: leaf["numbers_dense"] / (store.n_outputs * store.n_parameters) for leaf in largest}
    shapes = {leaf["path"]: "x".join(map(str, leaf["shape"])) for leaf in largest}
    lines = [(leaf["path"], shapes[leaf["path"]], f"{share[leaf['path']]:.1%}", leaf["why"]) for leaf in largest]
    if lines:
        table(f"{name}: the largest of {len(dense)} leaves stored as rows", [("leaf", "shape", "of P", "why"), *lines])


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run and print; returns a row for each model that ran."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="names with commas between them")
    parser.add_argument("--size", choices=("tiny", "default"), default="default")
    parser.add_argument("--memory", default="4GB")
    parser.add_argument("--out", type=Path, help="a CSV file")
    given = parser.parse_args(arguments)
    names = given.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"--models {','.join(unknown)}: allowed are {', '.join(MODELS)}")
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                row, store = measure(name, given.size == "tiny", given.memory, Path(folder))
            except ModuleNotFoundError as error:
                print(f"{name}: left out, {error.name} is not installed (pip install 'jacstore[zoo]')", flush=True)
                continue
            show_leaves(name, store)
            rows.append(row)
    if rows:
        show(rows)
        if given.out:
            write_csv(given.out, rows)
    return rows


if __name__ == "__main__":
    leave(partial(main, sys.argv[1:]))

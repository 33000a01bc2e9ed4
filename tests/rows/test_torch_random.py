"""Random modules of PyTorch: rows are those of autograd, one example at a time, or the module is refused.

`python tests/test_torch_random.py --cases 2000` searches longer. Skipped where torch is not installed.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter

import numpy as np
import pytest

import jacstore
from jacstore.base.limits import LIMITS
from jacstore.errors import JacstoreError

torch = pytest.importorskip("torch")
from tests.rows.test_torch import Function, rows_of, truth  # noqa: E402
from tests.rows.test_torch_calls import Clamped, Conv1D  # noqa: E402

nn, functional = torch.nn, torch.nn.functional
WIDTH = 6


def made_layer(draw):
    """A layer from `(n, T, WIDTH)` to the same, and its name."""
    name = draw.choice(list(LAYERS))
    return name, LAYERS[name](draw)


def hooked(draw):
    layer = nn.Linear(WIDTH, WIDTH)
    if draw.random() < 0.5:
        layer.register_forward_hook(lambda m, given, output: output.clamp(-2, 2) * 3)
    else:
        layer.register_forward_pre_hook(lambda m, given: (given[0].clamp(-1, 1),))
    return layer


def replaced(draw):
    layer = nn.Linear(WIDTH, WIDTH)
    layer.forward = lambda x: functional.linear(x.sin(), layer.weight, layer.bias)
    return layer


def branch(draw):
    bound = draw.uniform(-1, 3)

    def forward(m, x):
        y = torch.tanh(m.a(x))
        return m.b(y) if bool(x.mean() > bound) else y + (m.a.weight.sum(0) if bool(x.mean() < -bound) else 0)

    return Function(forward, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH))


def functionally(draw):
    ways = [
        lambda m, x: x @ m.w,
        lambda m, x: torch.matmul(x, m.w.T) + m.w.sum(0),
        lambda m, x: functional.linear(x, m.w.t(), m.w[0]),
        lambda m, x: torch.einsum("ntc,cd->ntd", x, m.w),
        lambda m, x: functional.linear(functional.linear(x, m.w), m.w.mT),
        lambda m, x: x @ (m.w + m.w.T),
        lambda m, x: functional.linear(x, m.w[:3]).repeat(1, 1, 2),
        lambda m, x: functional.linear(x, m.w).relu_() * m.w.detach().mean(),
    ]
    return Function(draw.choice(ways), w=nn.Parameter(torch.randn(WIDTH, WIDTH) / 2))


def shared(draw):
    module = Function(lambda m, x: m.b(torch.tanh(m.a(x))), a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH))
    module.b.weight = module.a.weight
    if draw.random() < 0.5:
        module.b.bias = module.a.bias
    return module


def adapted(draw):
    def forward(m, x):
        return x @ (m.w + 0.5 * m.a @ m.b)

    parts = {"w": (WIDTH, WIDTH), "a": (WIDTH, 2), "b": (2, WIDTH)}
    return Function(forward, **{name: nn.Parameter(torch.randn(shape) / 2) for name, shape in parts.items()})


def convolved(draw):
    mode = draw.choice(["zeros", "reflect", "circular"])
    groups = draw.choice([1, 2, 3])
    conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, padding_mode=mode, groups=groups)
    return Function(lambda m, x: m.c(x.transpose(1, 2)).transpose(1, 2), c=conv)


def recurrent(draw):
    kind = draw.choice([nn.LSTM, nn.GRU, nn.RNN])
    twice = draw.random() < 0.5
    layer = kind(WIDTH, WIDTH // 2 if twice else WIDTH, draw.choice([1, 2]), batch_first=True, bidirectional=twice)
    return Function(lambda m, x: m.r(x)[0], r=layer)


def attention(draw):
    layer = nn.MultiheadAttention(WIDTH, 2, batch_first=True, add_bias_kv=draw.random() < 0.3)
    if draw.random() < 0.5:
        return Function(lambda m, x: m.a(x, x, x)[0], a=layer)
    return Function(lambda m, x: m.a(x, x.sin(), x.cos())[0], a=layer)


def narrow(draw):
    return Function(lambda m, x: m.a(x).float().to(x.dtype), a=nn.Linear(WIDTH, WIDTH))


LAYERS = {
    "linear": lambda draw: nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.7),
    "clamped": lambda draw: Clamped(WIDTH, WIDTH),
    "hooked": hooked,
    "replaced": replaced,
    "branch": branch,
    "functional": functionally,
    "shared": shared,
    "adapted": adapted,
    "convolution": convolved,
    "recurrent": recurrent,
    "attention": attention,
    "encoder": lambda draw: nn.TransformerEncoderLayer(WIDTH, 2, 9, 0.0, batch_first=True),
    "narrow": narrow,
    "conv1d": lambda draw: Conv1D(WIDTH, WIDTH),
    "weight norm": lambda draw: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "prelu": lambda draw: nn.PReLU(),
    "norm": lambda draw: nn.LayerNorm(WIDTH),
}


def made_module(draw):
    """A chain of layers, some used twice, some with a residual, and a head."""
    named = [made_layer(draw) for _ in range(draw.randint(1, 3))]
    uses = [(n, draw.random() < 0.4) for n in range(len(named))]
    uses += [(draw.randrange(len(named)), False)] if draw.random() < 0.4 else []

    def forward(m, x):
        for n, residual in uses:
            y = torch.tanh(getattr(m, f"layer{n}")(x))
            x = x + y if residual else y
        return m.head(x.mean(1))

    layers = {f"layer{n}": layer for n, (_, layer) in enumerate(named)}
    module = Function(forward, **layers, head=nn.Linear(WIDTH, 3))
    for parameter in module.parameters():
        parameter.requires_grad_(draw.random() < 0.95)
    return " ".join(name for name, _ in named), module.eval()


def outcome(seed):
    """What a case is, and "right", "refused: ..." or "wrong: ..."."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    name, module = made_module(draw)
    module.head.requires_grad_(True)
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    x = torch.randn(5, 4, WIDTH)
    x[draw.randrange(5) :] *= draw.choice([1, 10])
    x[draw.randrange(5)] += draw.choice([0, 3])
    layout = draw.choice(["auto", "dense", "factored"])
    try:
        store = jacstore.torch.build(module, x, None, dtype="float64", layout=layout, batch_size=draw.choice([1, 3, 5]))
    except JacstoreError as error:
        return name, f"refused: {str(error)[:60]}"
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    wanted = truth(module, x)
    sizes = [(n, p.numel()) for n, p in module.named_parameters()]
    kept = np.concatenate([np.full(size, n not in frozen) for n, size in sizes])
    wanted = wanted[..., kept]
    found = rows_of(store).reshape(wanted.shape)
    # What is rounded to float32 on its way may fall to another side.
    bound = 1e-5 if "narrow" in name else 1e-10
    errors = np.linalg.norm(found - wanted, axis=(1, 2)) / np.linalg.norm(wanted, axis=(1, 2))
    return name, "right" if errors.max() <= bound else f"wrong: {errors.max():.1e}"


@pytest.mark.parametrize("seed", range(60))
def test_rows_of_a_random_module_are_those_of_autograd(seed, limits):
    limits(smallest_factored=0)
    name, found = outcome(seed)
    # A branch on the values of a whole batch looks like examples that are coupled.
    assert found == "right" or ("branch" in name and found.startswith("refused: outputs depend")), name


def search(cases, first):
    """Print how many cases are right, refused or wrong, and each that is not right."""
    LIMITS.smallest_factored = 0
    counts = Counter()
    for seed in range(first, first + cases):
        name, found = outcome(seed)
        counts[found if found.startswith("refused") else found.partition(":")[0]] += 1
        if found != "right":
            print(f"case {seed} ({name}): {found}", flush=True)
    for found, count in counts.most_common():
        print(f"{count:6} {found}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    search(given.cases, given.first)

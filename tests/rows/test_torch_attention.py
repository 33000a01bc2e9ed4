"""Attention of PyTorch, one call of many products, and products of some rows of a parameter: all give factors.

Skipped where torch is not installed.
"""

from __future__ import annotations

import pytest

import jacstore
from jacstore.testing import row_error

torch = pytest.importorskip("torch")
from tests.rows.test_torch import Function, rows_of, truth  # noqa: E402

nn, functional = torch.nn, torch.nn.functional
torch.set_num_threads(1)
WIDTH = 6


@pytest.fixture(autouse=True)
def _small_leaves_count(limits):
    limits(smallest_factored=0)
    torch.manual_seed(0)


ATTENTION = {
    "self": ({}, lambda m, x: m.a(x, x, x)[0]),
    "without weights": ({}, lambda m, x: m.a(x, x, x, need_weights=False)[0]),
    "weights are outputs": ({}, lambda m, x: torch.cat(m.a(x, x, x), -1)),
    "without bias": ({"bias": False}, lambda m, x: m.a(x, x, x)[0]),
    "first axis time": ({"batch_first": False}, lambda m, x: m.a(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1)),
    "keys are values": ({}, lambda m, x: m.a(x[:, :2], x.sin(), x.sin())[0]),
    "keys are values, two names": ({}, lambda m, x: m.a(x[:, :2], *[x.sin()] * 2, need_weights=False)[0]),
    "all apart": ({}, lambda m, x: m.a(x[:, :2], x.sin(), x.cos())[0]),
    "all apart without bias": ({"bias": False}, lambda m, x: m.a(x[:, :2], x.sin(), x.cos(), need_weights=False)[0]),
    "other widths": ({"kdim": 4, "vdim": 3}, lambda m, x: m.a(x, x[..., :4], x[..., :3])[0]),
    "causal": ({}, lambda m, x: m.a(x, x, x, attn_mask=torch.ones(3, 3).triu(1).bool(), need_weights=False)[0]),
}


def is_rows(store):
    return {leaf.path for leaf in store.leaves if leaf.dense}


@pytest.mark.parametrize("name", ATTENTION)
def test_projections_of_attention_are_factors_and_rows_those_of_autograd(name):
    options, forward = ATTENTION[name]
    module = Function(forward, a=nn.MultiheadAttention(WIDTH, 2, **{"batch_first": True, **options}))
    module.eval()
    x = torch.randn(4, 3, WIDTH)
    store = jacstore.torch.build(module, x, None, dtype="float64", layout="factored", batch_size=3)
    # A bias that is taken by parts where weights are not has cotangents that no weight stores.
    assert is_rows(store) == ({"a/in_proj_bias"} if name == "other widths" else set())
    rows = truth(module, x)
    assert row_error(rows_of(store), rows.reshape(-1, rows.shape[-1])) <= 1e-12
    assert store.report["vmap"]


@pytest.mark.parametrize("norm_first", [False, True])
def test_all_matrices_of_a_transformer_encoder_are_factors(norm_first):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 9, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    module = Function(lambda m, x: m.head(m.encoder(x).mean(1)), encoder=encoder, head=nn.Linear(WIDTH, 3)).eval()
    x = torch.randn(4, 3, WIDTH)
    store = jacstore.torch.build(module, x, None, dtype="float64", layout="factored")
    assert all("norm" in path for path in is_rows(store)) and len(is_rows(store)) == 8
    assert row_error(rows_of(store), truth(module, x).reshape(12, -1)) <= 1e-12


def test_all_matrices_of_a_transformer_decoder_are_factors():
    layer = nn.TransformerDecoderLayer(WIDTH, 2, 9, batch_first=True)
    module = Function(lambda m, x: m.layer(x[:, :2], x.sin()).mean(1), layer=layer).eval()
    x = torch.randn(4, 3, WIDTH)
    store = jacstore.torch.build(module, x, None, dtype="float64", layout="factored")
    assert all("norm" in path for path in is_rows(store)) and len(is_rows(store)) == 6
    assert row_error(rows_of(store), truth(module, x).reshape(24, -1)) <= 1e-12


PARTS = {
    "slices": (lambda m, x: functional.linear(functional.linear(x, m.w[:4]), m.w[4:, :].T[:4].T), None),
    "slice of a slice": (lambda m, x: functional.linear(x, m.w[1:][1:4]), set()),
    "chunks along": (lambda m, x: functional.linear(x, torch.chunk(m.w, 3)[1]), set()),
    "split": (lambda m, x: torch.cat([functional.linear(x, w) for w in m.w.split([1, 5])], -1), set()),
    "narrow": (lambda m, x: functional.linear(x, m.w.narrow(0, 2, 3)), set()),
    "columns": (lambda m, x: functional.linear(x[..., :3], m.w[:, :3]), {"w"}),
    "columns by a chunk": (lambda m, x: functional.linear(x[..., :3], m.w.chunk(2, -1)[1]), {"w"}),
    "every second row": (lambda m, x: functional.linear(x, m.w[::2]), {"w"}),
    "turned": (lambda m, x: x[..., :4] @ m.w[:4], {"w"}),
    "turned twice": (lambda m, x: x @ m.w[:4].T, set()),
    "one number for all": (lambda m, x: functional.linear(x, m.w, m.w[0, :1]), {"w"}),
    "a part and the whole": (lambda m, x: functional.linear(x, m.w) + functional.linear(x, m.w[:1]), set()),
    "a part is used otherwise": (lambda m, x: functional.linear(x, m.w[:4]) + m.w[4:].sum(), {"w"}),
}


@pytest.mark.parametrize("name", PARTS)
def test_products_of_some_rows_of_a_parameter_are_its_terms(name):
    forward, rows = PARTS[name]
    module = Function(lambda m, x: forward(m, x).mean(1), w=nn.Parameter(torch.randn(WIDTH, WIDTH)))
    x = torch.randn(4, 3, WIDTH)
    store = jacstore.torch.build(module, x, None, dtype="float64", layout="factored")
    if rows is not None:
        assert is_rows(store) == rows
    wanted = truth(module, x)
    assert row_error(rows_of(store), wanted.reshape(-1, wanted.shape[-1])) <= 1e-12


@pytest.mark.parametrize("first", [0, 2])
def test_a_bias_of_one_number_for_all_outputs_is_rows(first):
    module = Function(lambda m, x: functional.linear(x, m.w, m.b[first : first + 1]), w=nn.Parameter(torch.randn(6, 6)))
    module.b = nn.Parameter(torch.randn(1 if first == 0 else 3))
    x = torch.randn(4, 6)
    store = jacstore.torch.build(module, x, None, dtype="float64", layout="factored")
    assert is_rows(store) == {"b"}
    assert row_error(rows_of(store), truth(module, x).reshape(24, -1)) <= 1e-12

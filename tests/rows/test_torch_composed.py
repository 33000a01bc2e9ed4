"""Recurrent layers of PyTorch, one call that multiplies several parameters: each product gives factors.

Skipped where torch is not installed.
"""

from __future__ import annotations

import numpy as np
import pytest

import jacstore
from jacstore.testing import row_error

torch = pytest.importorskip("torch")
from jacstore.rows.torch.composed import compose  # noqa: E402
from tests.rows.test_torch import Function, rows_of, terms_of, truth  # noqa: E402

nn = torch.nn
torch.set_num_threads(1)
WIDTH = 4


@pytest.fixture(autouse=True)
def _small_leaves_count(limits):
    limits(smallest_factored=0)
    torch.manual_seed(0)


class Composing(torch.overrides.TorchFunctionMode):
    """Counts the calls that are written out, and writes them out."""

    def __init__(self):
        super().__init__()
        self.composed = self.linear = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = compose(function, args, kwargs or {})
        self.linear += function is nn.functional.linear
        if not found:
            return function(*args, **(kwargs or {}))
        self.composed += 1
        with self:
            return found.run()


RECURRENT = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "rnn": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "lstm of two layers": (nn.LSTM, {"num_layers": 2, "batch_first": True, "dropout": 0.5}),
    "lstm both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "gru both ways without bias": (nn.GRU, {"num_layers": 3, "bidirectional": True, "bias": False}),
    "rnn first axis time": (nn.RNN, {"num_layers": 2, "bidirectional": True}),
}


def recurrent(name):
    kind, options = RECURRENT[name]
    return kind(3, WIDTH, **options).double().eval()


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrence_written_out_is_that_of_torch(name, started):
    layer, x = recurrent(name), torch.randn(5, 2, 3).double()
    states = None
    if started:
        batch = x.shape[0] if layer.batch_first else x.shape[1]
        count = layer.num_layers * (2 if layer.bidirectional else 1)
        states = torch.randn(count, batch, WIDTH).double()
        states = (states, states.cos()) if isinstance(layer, nn.LSTM) else states
    wanted = layer(x, states)
    with Composing() as mode:
        found = layer(x, states)
    assert mode.composed == 1 and mode.linear >= 2
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def sequences(layer, x):
    """The outputs and the last states of a recurrent layer on sequences, flattened."""
    x = x if layer.batch_first else x.transpose(0, 1)
    output, states = layer(x)
    states = torch.cat(states) if isinstance(states, tuple) else states
    output = output if layer.batch_first else output.transpose(0, 1)
    return torch.cat([output[:, -2:].flatten(1), states.transpose(0, 1).flatten(1)], 1)


@pytest.mark.parametrize("layout", ["auto", "factored"])
@pytest.mark.parametrize("name", RECURRENT)
def test_parameters_of_recurrent_layers_are_factors_and_rows_those_of_autograd(name, layout):
    layer = recurrent(name)
    module = Function(lambda m, x: m.head(sequences(m.layer, x)), layer=layer, head=nn.LazyLinear(3))
    x = torch.randn(4, 3, 3)
    module.double()(x.double())
    store = jacstore.torch.build(module, x, None, dtype="float64", layout=layout, batch_size=2)
    assert store.report["vmap"]
    if layout == "factored":
        assert set(terms_of(store).split()) == {"dot"}
    assert row_error(rows_of(store), truth(module, x).reshape(12, -1)) <= 1e-12


def test_steps_of_a_recurrent_layer_are_positions_of_one_product():
    module = Function(lambda m, x: m.layer(x)[0][:, -1], layer=nn.LSTM(30, 40, batch_first=True))
    store = jacstore.torch.build(module, torch.randn(4, 5, 30), None)
    assert terms_of(store) == "dot dot dot dot"
    operands = {operand.name: operand.shape for operand in store.operands}
    shapes = [[operands[name] for name in leaf.operands] for leaf in store.leaves[:2]]
    assert shapes == [[(1, 5, 30), (1, 5, 160)], [(1, 5, 40), (1, 5, 160)]]


def unrolled(m, x):
    """Cells called step by step."""
    h, c, g, r = (torch.zeros(len(x), WIDTH, dtype=x.dtype) for _ in range(4))
    for t in range(x.shape[1]):
        h, c = m.lstm(x[:, t], (h, c))
        g, r = m.gru(h, g), m.rnn(x[:, t], r)
    return torch.cat([h + g, r], 1)


def test_cells_of_recurrent_layers_are_factors_too():
    layers = {"lstm": nn.LSTMCell(3, WIDTH), "gru": nn.GRUCell(WIDTH, WIDTH), "rnn": nn.RNNCell(3, WIDTH)}
    module, x = Function(unrolled, **layers), torch.randn(4, 3, 3)
    store = jacstore.torch.build(module, x, None, dtype="float64", layout="factored")
    assert set(terms_of(store).split()) == {"dot"} and store.report["vmap"]
    assert row_error(rows_of(store), truth(module, x)) <= 1e-12


def packed(m, x):
    lengths = torch.full((len(x),), x.shape[1])
    _, (h, _) = m.layer(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))
    return h[-1]


LEFT = {
    "packed sequences": (lambda: nn.LSTM(3, WIDTH, batch_first=True), packed),
    "states that are projected": (
        lambda: nn.LSTM(3, WIDTH, proj_size=2, batch_first=True),
        lambda m, x: m.layer(x)[0][:, -1],
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_recurrent_layers_are_rows(name):
    made, forward = LEFT[name]
    module, x = Function(forward, layer=made()), torch.randn(4, 3, 3)
    store = jacstore.torch.build(module, x, None, dtype="float64", layout="factored")
    assert set(terms_of(store).split()) == {"dense"}
    assert row_error(rows_of(store), truth(module, x)) <= 1e-12


def test_a_frozen_weight_of_a_recurrent_layer_leaves_the_others_factors():
    module, x = (
        Function(lambda m, x: m.layer(x)[0][:, -1], layer=nn.GRU(3, WIDTH, batch_first=True)),
        torch.randn(4, 3, 3),
    )
    module.layer.weight_hh_l0.requires_grad_(False)
    store = jacstore.torch.build(module, x, None, dtype="float64", layout="factored")
    module.layer.weight_hh_l0.requires_grad_(True)
    sizes = [(name, p.numel()) for name, p in module.named_parameters()]
    kept = np.concatenate([np.full(size, name != "layer.weight_hh_l0") for name, size in sizes])
    assert terms_of(store).startswith("dot ")
    assert row_error(rows_of(store), truth(module, x)[..., kept].reshape(16, -1)) <= 1e-12

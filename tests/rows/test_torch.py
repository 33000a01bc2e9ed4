"""The on-ramp for PyTorch: rows and kernels are those of torch.func, layers give factors, and builds keep the promises.

Skipped where torch is not installed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jacstore
from helpers_process import contents
from jacstore.base.events import BatchDone
from jacstore.errors import (
    InvalidFunctionError,
    InvalidRequestError,
    NonFiniteError,
    RequestMismatchError,
    RunInterruptedError,
)
from jacstore.testing import Counting, Stopping, dense_kernel, kernel_error, row_error
from support import Table, rows_of, terms_of

torch = pytest.importorskip("torch")
nn = torch.nn
# Tiny networks on a busy machine: a second thread only waits for the first.
torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@pytest.fixture(autouse=True)
def _small_leaves_count(limits):
    limits(smallest_factored=0)


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


class Function(nn.Module):
    """A module whose forward is a function of it, for tests that need a network of one use only."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs, **named):
        return self.run(self, *inputs, **named)


def cnn():
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, (3, 2), padding=(2, 1), dilation=2, groups=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 24, 2, padding="same", bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 4),
    )
    layers[1].running_mean.normal_()
    layers[1].running_var.uniform_(0.5, 2)
    return layers.eval(), torch.randn(6, 3, 10, 8)


def token_model():
    def forward(m, ids):
        x = m.norm(m.table(ids) + m.places(torch.arange(ids.shape[1])))
        return m.head(torch.tanh(m.up(x)).mean(1)) * m.scale

    module = Function(
        forward,
        table=nn.Embedding(50, 6, padding_idx=0),
        places=nn.Embedding(5, 6),
        norm=nn.LayerNorm(6),
        up=nn.Linear(6, 30),
        head=nn.Linear(30, 3),
        scale=nn.Parameter(torch.randn(3)),
    )
    return module, torch.randint(0, 50, (6, 5))


def space(kind, window, **options):
    def made():
        layer = {1: nn.Conv1d, 3: nn.Conv3d}[kind](4, 16, window, **options)
        module = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))
        x = torch.randn(4, 4, *(5, 3, 4)[:kind])
        module(x)
        return module, x

    return made


def reflected():
    return nn.Sequential(nn.Conv1d(2, 6, 3, padding=1, padding_mode="reflect"), nn.Flatten(), nn.Linear(24, 2)), (
        torch.randn(4, 2, 4)
    )


def recurring():
    def forward(m, x):
        h = torch.zeros(len(x), 12)
        for t in range(x.shape[1]):
            h = torch.tanh(m.step(torch.cat([h, x[:, t]], 1)))
        return m.head(h)

    return Function(forward, step=nn.Linear(16, 12), head=nn.Linear(12, 3)), torch.randn(5, 3, 4)


def conv_twice():
    def forward(m, x):
        return m.head(torch.tanh(m.conv(torch.tanh(m.conv(x)))).flatten(1))

    return Function(forward, conv=nn.Conv2d(8, 8, 3, padding=1), head=nn.Linear(72, 2)), torch.randn(4, 8, 3, 3)


def pyramid():
    def forward(m, x):
        return m.head((m.conv(x).mean((2, 3)) + m.conv(x[:, :, ::2, ::2]).mean((2, 3))).tanh())

    return Function(forward, conv=nn.Conv2d(8, 8, 2), head=nn.Linear(8, 2)), torch.randn(4, 8, 4, 4)


def tied_linear():
    module = Function(lambda m, x: m.b(torch.tanh(m.a(x)))[:, :3].tanh(), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    module.b.weight = module.a.weight
    return module, torch.randn(5, 8)


def tied_embedding():
    module = Function(
        lambda m, ids: m.decoder(torch.tanh(m.table(ids)).sum(1))[:, :3],
        table=nn.Embedding(60, 6),
        decoder=nn.Linear(6, 60, bias=False),
    )
    module.decoder.weight = module.table.weight
    return module, torch.randint(0, 60, (5, 4))


def used_outside():
    def forward(m, x):
        return m.head(torch.relu(m.a(x)) + torch.relu(x @ m.a.weight.T - 5))

    return Function(forward, a=nn.Linear(8, 8), head=nn.Linear(8, 2)), torch.randn(5, 8)


def used_plainly():
    def forward(m, x):
        return m.head(torch.relu(m.a(x)) + m.a.weight.sum(0))

    return Function(forward, a=nn.Linear(8, 8), head=nn.Linear(8, 2)), torch.randn(5, 8)


def sequence_first():
    def forward(m, x):
        return m.head(torch.tanh(m.up(x.transpose(0, 1)))).mean(0)

    return Function(forward, up=nn.Linear(24, 20), head=nn.Linear(20, 3)), torch.randn(5, 5, 24)


def frames():
    def forward(m, x):
        return m.head(torch.tanh(m.conv(x.flatten(0, 1))).unflatten(0, x.shape[:2]).sum(1).flatten(1))

    return Function(forward, conv=nn.Conv2d(16, 20, 2), head=nn.Linear(80, 3)), torch.randn(4, 3, 16, 3, 3)


def shared_inputs():
    def forward(m, x):
        weights = torch.softmax(m.q(x) @ m.k(x).transpose(1, 2), -1)
        return m.out((weights @ m.v(x)).mean(1))

    layers = {name: nn.Linear(8, 8) for name in ("q", "k", "v")}
    return Function(forward, **layers, out=nn.Linear(8, 2)), torch.randn(4, 3, 8)


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 40, dropout=0.1, batch_first=True)
    return Function(lambda m, x: m.head(m.layer(x).mean(1)), layer=layer, head=nn.Linear(8, 3)).eval(), (
        torch.randn(4, 3, 8)
    )


def lstm():
    module = Function(
        lambda m, x: m.head(m.lstm(x)[0][:, -1]), lstm=nn.LSTM(3, 4, batch_first=True), head=nn.Linear(4, 3)
    )
    return module, torch.randn(4, 3, 3)


def several_inputs():
    module = Function(
        lambda m, a, b: {"y": m.a(a).tanh() * b["s"], "x": m.b(b["t"])}, a=nn.Linear(4, 9), b=nn.Linear(2, 3)
    )
    return module, (torch.randn(4, 4), {"s": torch.randn(4, 1), "t": torch.randn(4, 2)})


# For each network the terms of its leaves in the order of named_parameters.
NETWORKS = {
    "cnn": (cnn, "dense dense dense dense dense dense conv dot dot"),
    "tokens": (token_model, "dense index dense dense dense dot dot dot dot"),
    "conv 1-D": (space(1, 3, stride=2), "conv dot dot dot"),
    "conv 3-D": (space(3, 2, padding=1), "dense dense dot dot"),
    "padding that reflects": (reflected, "dense dense dot dot"),
    "a layer called three times": (recurring, "dot dot dot dot"),
    "a convolution called twice": (conv_twice, "conv dot dot dot"),
    "images of two sizes": (pyramid, "dense dense dot dot"),
    "tied layers": (tied_linear, "dot+dot dot dot"),
    "tied embedding": (tied_embedding, "dot+index"),
    "a weight used by two calls": (used_outside, "dot+dot dot dot dot"),
    "a weight used as it is": (used_plainly, "dense dense dot dot"),
    "sequence first": (sequence_first, "dot dot dot dot"),
    "frames as a batch": (frames, "conv dot dot dot"),
    "inputs shared by layers": (shared_inputs, "dot dot dot dot dot dot dot dot"),
    "transformer layer": (encoder, "dot dot dot dot dot dot dot dot dense dense dense dense dot dot"),
    "lstm": (lstm, "dense dot dense dot dot dot"),
    "several inputs and outputs": (several_inputs, "dot dot dot dot"),
}


def truth(module, inputs, outputs="all"):
    """Rows `(N, K, P)` in float64, one example and one output after another by autograd alone."""
    values = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    buffers = {name: b.double() if b.is_floating_point() else b for name, b in module.named_buffers()}

    def leaves(tree):
        if isinstance(tree, dict):
            return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
        return [leaf for part in tree for leaf in leaves(part)] if isinstance(tree, tuple) else [tree]

    def at(tree, n):
        if isinstance(tree, dict):
            return {key: at(value, n) for key, value in tree.items()}
        if isinstance(tree, tuple):
            return tuple(at(value, n) for value in tree)
        return tree[n : n + 1].double() if tree.is_floating_point() else tree[n : n + 1]

    rows = []
    for n in range(len(leaves(inputs)[0])):
        one = at(inputs, n)
        found = torch.func.functional_call(module, {**values, **buffers}, one if isinstance(one, tuple) else (one,))
        flat = torch.cat([leaf.reshape(-1) for leaf in leaves(found)])
        flat = flat.sum(0, keepdim=True) if outputs == "sum" else flat
        grads = [
            torch.autograd.grad(y, list(values.values()), retain_graph=True, materialize_grads=True, allow_unused=True)
            for y in flat
        ]
        rows.append([np.concatenate([g.numpy().reshape(-1) for g in one]) for one in grads])
    return np.array(rows)


@pytest.mark.parametrize("name", NETWORKS)
def test_rows_and_kernels_are_those_of_autograd(name):
    module, inputs = NETWORKS[name][0]()
    store = jacstore.torch.build(module, inputs, None, dtype="float64", batch_size=3)
    assert terms_of(store) == NETWORKS[name][1]
    rows = truth(module, inputs)
    assert row_error(rows_of(store), rows) <= 1e-12
    np.testing.assert_allclose(store.norms.sum(-1), np.square(rows).sum(-1), rtol=1e-12)
    kernel = jacstore.gram(store)
    assert kernel_error(kernel.array.compute(scheduler="synchronous"), dense_kernel(rows)) <= 1e-12
    assert store.report["vmap"]
    assert [leaf.path for leaf in store.leaves] == [n.replace(".", "/") for n, _ in module.named_parameters()]


@pytest.mark.parametrize("layout", ["dense", "factored"])
@pytest.mark.parametrize("outputs", ["sum", [2, 0]])
@pytest.mark.parametrize("name", ["cnn", "tokens"])
def test_other_layouts_and_outputs_give_the_same_rows_in_float32(name, outputs, layout):
    module, inputs = NETWORKS[name][0]()
    store = jacstore.torch.build(module, inputs, None, outputs=outputs, layout=layout)
    rows = truth(module, inputs, outputs)
    rows = rows if outputs == "sum" else rows[:, outputs]
    assert row_error(rows_of(store), rows) <= 1e-5
    assert ("dot" in terms_of(store)) == (layout == "factored")
    kernel = jacstore.gram(store, mode="trace").array.compute(scheduler="synchronous")
    assert kernel_error(kernel, dense_kernel(rows, mode="trace")) <= 1e-5


def test_rows_are_those_of_torch_func_jacrev_and_outputs_those_of_the_module():
    module, inputs = cnn()
    store = jacstore.torch.build(module, inputs, None)
    values = {name: p.detach() for name, p in module.named_parameters()}

    def one(values, x):
        return torch.func.functional_call(module, values, (x[None],))[0]

    jacobian = torch.func.vmap(torch.func.jacrev(one), (None, 0))(values, inputs)
    rows = np.concatenate([part.flatten(2).numpy() for part in jacobian.values()], -1)
    assert row_error(rows_of(store), rows) <= 1e-5
    np.testing.assert_allclose(store.outputs, module(inputs).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_a_report_says_what_each_step_before_the_first_batch_took():
    module, inputs = shared_inputs()
    report = jacstore.torch.build(module, inputs, None).report
    assert list(report["seconds_start"]) == ["probe", "calls", "choice", "comparison"]
    assert 0 < sum(report["seconds_start"].values()) < report["seconds_total"]


def test_inputs_that_layers_share_are_stored_once():
    module, inputs = shared_inputs()
    store = jacstore.torch.build(module, inputs, None)
    assert len([o for o in store.operands if o.role == "inputs"]) == 2


def test_frozen_parameters_are_left_out_and_the_module_stays_as_it_was():
    module, inputs = cnn()
    module[0].weight.requires_grad_(False)
    module.train(False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    store = jacstore.torch.build(module, inputs, None, dtype="float64")
    assert store.leaves[0].path == "0/bias" and store.info()["left_out"] == [["0/weight", "requires_grad is False"]]
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in module.parameters())
    assert not any(layer._forward_hooks for layer in module.modules())


class Pairs(torch.utils.data.Dataset):
    """Examples that come one at a time."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


def test_datasets_numpy_and_narrow_tensors_are_inputs_too():
    module, x = recurring()
    wanted = rows_of(jacstore.torch.build(module, x, None))
    for given in (Pairs(x), x.numpy().astype(np.float64), {"x": x}):
        if isinstance(given, dict):
            module.run = lambda m, x, run=module.run: run(m, x)
        assert row_error(rows_of(jacstore.torch.build(module, given, None)), wanted) <= 1e-6
    half = jacstore.torch.build(module, x.bfloat16(), None)
    assert row_error(rows_of(half), truth(module, x.bfloat16())) <= 1e-5


@pytest.mark.parametrize("convert", [np.ndarray.tolist, torch.tensor])
def test_a_table_of_named_columns_is_read_as_keywords(convert):
    module, x = recurring()
    forward = module.run
    wanted = rows_of(jacstore.torch.build(module, x, None))
    module.run = lambda m, *, pixels: forward(m, pixels)
    store = jacstore.torch.build(module, Table(x.numpy(), convert), None)
    assert row_error(rows_of(store), wanted) <= 1e-6


class Chunked:
    """Examples in one chunk, which is held as a whole, as in Zarr."""

    def __init__(self, values, length):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype
        self.chunks = (length, *values.shape[1:])

    def __getitem__(self, at):
        return self.values[at]


def test_chunks_of_inputs_that_do_not_fit_are_refused():
    inputs = Chunked(np.zeros((4, 4), np.float32), 10_000_000)
    with pytest.raises(InvalidRequestError, match="smaller chunks"):
        jacstore.torch.build(nn.Linear(4, 2), inputs, None, memory="100MB")
    assert jacstore.torch.build(nn.Linear(4, 2), inputs, None, memory="2GB").complete


def test_many_outputs_are_taken_in_slices_within_the_memory():
    module, x = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 200)), torch.randn(3, 20)
    rows = truth(module, x)
    store = jacstore.torch.build(module, x, None, dtype="float64", layout="dense", memory="40MB", unit_size=1)
    assert row_error(rows_of(store), rows) <= 1e-12


def test_an_embedding_without_factors_in_bfloat16():
    module, x = token_model()
    store = jacstore.torch.build(module.bfloat16(), x, None, dtype="bfloat16")
    assert row_error(rows_of(store), truth(module, x)) <= 0.1


# ------------------------------------------------------------------------------------------------------------ promises


def grown(width=10, slope=1.0):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, width), nn.LeakyReLU(slope), nn.Linear(width, 2))
    return module, torch.randn(7, 4)


CHILD = """
import os, signal, sys
sys.path[:0] = {folders!r}
import torch, jacstore.torch
from jacstore.base.events import UnitDone
from tests.rows.test_torch import cnn

units = 0
def listener(event):
    global units
    units += isinstance(event, UnitDone)
    if units == 2:
        os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
module, inputs = cnn()
jacstore.torch.build(module, inputs, {out!r}, unit_size=1, listener=listener)
"""


def test_a_killed_build_continues_and_equals_an_uninterrupted_one_to_the_bit(tmp_path):
    out = tmp_path / "killed.jac"
    folders = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "helpers")]
    code = CHILD.format(folders=folders, out=str(out))
    died = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert died.returncode == -9, died.stderr
    torch.manual_seed(0)
    module, inputs = cnn()
    store = jacstore.torch.build(module, inputs, out, unit_size=1)
    assert (store.report["units_reused"], store.report["units_computed"]) == (2, 4)
    jacstore.torch.build(module, inputs, tmp_path / "whole.jac", unit_size=1)
    names = ("rows", "factors", "outputs", "norms")
    assert contents(out, *names) == contents(tmp_path / "whole.jac", *names)
    assert jacstore.torch.build(module, inputs, out).report["units_computed"] == 0
    assert jacstore.open(out).complete


def test_an_interrupted_build_says_what_is_missing_and_continues(tmp_path):
    module, inputs = grown()
    seen = Stopping(BatchDone, after=3)
    with pytest.raises(RunInterruptedError, match="units missing"):
        jacstore.torch.build(module, inputs, tmp_path / "s", unit_size=2, batch_size=1, listener=seen, stop=seen.stop)
    again = Counting()
    store = jacstore.torch.build(module, inputs, tmp_path / "s", unit_size=2, batch_size=2, listener=again)
    assert store.report["units_reused"] == 1 and sum(e.examples for e in again.of(BatchDone)) == 5
    assert row_error(rows_of(store), truth(module, inputs)) <= 1e-5


def test_parts_fill_one_store(tmp_path):
    module, inputs = grown()
    for part in ("2/2", "1/2"):
        store = jacstore.torch.build(module, inputs, tmp_path / "s", unit_size=2, part=part)
    assert store.complete and row_error(rows_of(store), truth(module, inputs)) <= 1e-5


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_verify_proves_what_torch_computed_and_finds_a_changed_byte(tmp_path, dtype):
    network, inputs = cnn()
    out = tmp_path / "run.jac"
    store = jacstore.torch.build(network, inputs, out=out, dtype=dtype, unit_size=2)
    kernel = jacstore.gram(store, out=tmp_path / "run.ntk")
    for path in (out, kernel.path):
        report = jacstore.verify(path, full=True)
        assert report.ok and {"checksums"} <= {check.name for check in report.checks if check.state == "ok"}
    pieces = [file for file in (out / "factors").rglob("*") if file.is_file() and file.suffix != ".json"]
    file = max(pieces, key=lambda piece: piece.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    assert not jacstore.verify(out).ok
    again = jacstore.torch.build(network, inputs, out=out, dtype=dtype, unit_size=2)
    assert again.report["units_computed"] == 1 and jacstore.verify(out).ok


def changed_weights(module, inputs):
    with torch.no_grad():
        module[0].weight[0, 0] += 1
    return module, inputs, {}


def changed_slope(module, inputs):
    return grown(slope=0.5)[0], inputs, {}


def changed_layer(module, inputs):
    return nn.Sequential(module[0], nn.ELU(), module[2]), inputs, {}


def changed_inputs(module, inputs):
    return module, inputs + 1, {}


CHANGES = {
    "parameters": changed_weights,
    "function": changed_layer,
    "inputs": changed_inputs,
    "leaves": lambda module, inputs: (*grown(11), {}),
    "outputs": lambda module, inputs: (module, inputs, {"outputs": "sum"}),
    "layout": lambda module, inputs: (module, inputs, {"layout": "dense"}),
    "dtype": lambda module, inputs: (module, inputs, {"dtype": "float64"}),
    "n_examples": lambda module, inputs: (module, inputs[:5], {}),
    "unit_size": lambda module, inputs: (module, inputs, {"unit_size": 3}),
}


@pytest.mark.parametrize("field", CHANGES)
def test_another_request_is_refused_and_named_and_overwrite_starts_anew(tmp_path, field):
    module, inputs = grown()
    jacstore.torch.build(module, inputs, tmp_path / "s", unit_size=2)
    module, inputs, options = CHANGES[field](module, inputs)
    options = {"unit_size": 2, **options}
    with pytest.raises(RequestMismatchError, match=field) as refused:
        jacstore.torch.build(module, inputs, tmp_path / "s", **options)
    assert "\n" not in str(refused.value)
    assert jacstore.torch.build(module, inputs, tmp_path / "s", overwrite=True, **options).complete


def test_attributes_buffers_and_what_no_text_shows_are_part_of_the_request(tmp_path):
    module, inputs = grown()
    jacstore.torch.build(module, inputs, tmp_path / "a")
    with pytest.raises(RequestMismatchError, match="function"):
        jacstore.torch.build(changed_slope(module, inputs)[0], inputs, tmp_path / "a")
    module, inputs = cnn()
    jacstore.torch.build(module, inputs, tmp_path / "b")
    module[1].running_mean += 1
    with pytest.raises(RequestMismatchError, match="constants"):
        jacstore.torch.build(module, inputs, tmp_path / "b")
    layer = nn.Linear(4, 2)
    module = Function(lambda m, x: m.a(x).tanh(), a=layer)
    jacstore.torch.build(module, torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), tmp_path / "c")
    module.run = lambda m, x: m.a(x).sin()
    with pytest.raises(RequestMismatchError, match="function: outputs of example 0 changed"):
        jacstore.torch.build(module, torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), tmp_path / "c")


def test_a_rectangular_kernel_needs_the_same_parameters(tmp_path):
    module, inputs = grown()
    stores = [jacstore.torch.build(module, x, None, dtype="float64") for x in (inputs, inputs[:3] + 1)]
    rows = [truth(module, x) for x in (inputs, inputs[:3] + 1)]
    found = jacstore.gram(*stores).array.compute(scheduler="synchronous")
    assert kernel_error(found, dense_kernel(*rows), rows[0], rows[1]) <= 1e-12
    with pytest.raises(InvalidRequestError, match="parameters"):
        jacstore.gram(stores[0], jacstore.torch.build(*changed_weights(module, inputs)[:2], None))


@pytest.mark.parametrize("allow", [False, True])
def test_rows_that_are_not_finite_are_refused_naming_the_example(allow):
    module, inputs = grown()
    inputs[4, 1] = torch.nan
    if not allow:
        with pytest.raises(NonFiniteError, match=r"example\(s\) 4 "):
            jacstore.torch.build(module, inputs, None)
        return
    store = jacstore.torch.build(module, inputs, None, allow_nonfinite=True)
    assert np.flatnonzero(np.isnan(rows_of(store)).any(1)).tolist() == [8, 9]


def test_a_first_example_that_is_not_finite_is_the_builds_to_report():
    module, inputs = grown()
    inputs[0] = torch.inf
    with pytest.raises(NonFiniteError, match=r"example\(s\) 0 "):
        jacstore.torch.build(module, inputs, None)


class Detached(torch.autograd.Function):
    """The identity with a gradient of its own, which torch.func cannot map: the truth is still autograd's."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return 3 * g


def test_what_torch_func_cannot_map_is_taken_one_example_at_a_time():
    module = Function(lambda m, x: Detached.apply(m.a(x)).tanh(), a=nn.Linear(4, 3))
    store = jacstore.torch.build(module, torch.randn(5, 4), None)
    assert not store.report["vmap"] and terms_of(store) == "dot dot"
    module.run = lambda m, x: 3 * m.a(x) - 2 * m.a(x).detach()
    inputs = torch.randn(5, 4)
    assert row_error(rows_of(jacstore.torch.build(module, inputs, None)), truth(module, inputs)) <= 1e-5


class Odd(nn.Linear):
    """A layer whose output is not the product of its weight alone."""

    def forward(self, x):
        return super().forward(x) * torch.sigmoid(x.sum(-1, keepdim=True))


def test_a_layer_that_computes_more_than_its_product_keeps_the_factors_of_the_product():
    module, inputs = nn.Sequential(Odd(6, 20), nn.Tanh(), nn.Linear(20, 2)), torch.randn(5, 6)
    store = jacstore.torch.build(module, inputs, None, dtype="float64")
    assert terms_of(store) == "dot dot dot dot"
    assert row_error(rows_of(store), truth(module, inputs)) <= 1e-12


def test_outputs_that_ignore_their_parameters_are_zero_rows():
    module = Function(lambda m, x: x[:, :2] + 0 * m.a(x), a=nn.Linear(4, 2), b=nn.Linear(4, 2))
    store = jacstore.torch.build(module, torch.randn(3, 4), None)
    assert not rows_of(store).any() and store.info()["zero_rows"] == 6


def linear(forward, width=2):
    return lambda: Function(forward, a=nn.Linear(4, width))


X = torch.tensor([[1.0, 2, 3, 4], [-5, -6, -7, -8], [1, 1, 1, 1]])
REFUSALS = {
    "dropout": (
        lambda: nn.Sequential(nn.Linear(4, 2), nn.Dropout()),
        X,
        {},
        InvalidFunctionError,
        r"'1' \(Dropout\).*eval",
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)),
        X,
        {},
        InvalidFunctionError,
        "couples.*eval",
    ),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8), X[:, None], {}, InvalidFunctionError, "noise.*eval"),
    "noise": (
        lambda: Function(lambda m, x: m.a(x + torch.rand(())), a=nn.Linear(4, 2)),
        X,
        {},
        InvalidFunctionError,
        "call to call",
    ),
    "no statistics": (
        lambda: nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Flatten(), nn.Linear(8, 2)).eval(),
        X[:, :, None].expand(3, 4, 2).contiguous(),
        {},
        InvalidFunctionError,
        "other examples",
    ),
    "coupled": (
        lambda: Function(lambda m, x: m.a(x - x.mean(0)), a=nn.Linear(4, 2)),
        X,
        {},
        InvalidFunctionError,
        "other examples",
    ),
    "not a module": (lambda: torch.tanh, X, {}, InvalidRequestError, "torch.nn.Module"),
    "nothing to differentiate": (
        lambda: nn.Linear(4, 2).requires_grad_(False),
        X,
        {},
        InvalidRequestError,
        "requires_grad",
    ),
    "complex": (lambda: nn.Linear(4, 2, dtype=torch.complex64), X, {}, InvalidRequestError, "complex64"),
    "wrong shape": (lambda: nn.Linear(5, 2), X, {}, InvalidRequestError, r"module raised RuntimeError.*float32\[4\]"),
    "integer outputs": (linear(lambda m, x: m.a(x).argmax(1)), X, {}, InvalidRequestError, "int64"),
    "no batch axis": (linear(lambda m, x: m.a(x).sum()), X, {}, InvalidRequestError, "batch of 1"),
    "no outputs": (linear(lambda m, x: m.a(x)[:, :0]), X, {}, InvalidRequestError, "K = 0"),
    "infinite": (linear(lambda m, x: m.a(x) / 0), X, {}, InvalidFunctionError, "output 0 of example 0"),
    "no example": (lambda: nn.Linear(4, 2), X[:0], {}, InvalidRequestError, "0 examples"),
    "output out of range": (lambda: nn.Linear(4, 2), X, {"outputs": [2]}, InvalidRequestError, "0 to 1"),
    "layout": (lambda: nn.Linear(4, 2), X, {"layout": "sparse"}, InvalidRequestError, "layout"),
    "dtype": (lambda: nn.Linear(4, 2), X, {"dtype": "int8"}, InvalidRequestError, "dtype"),
    "batch size": (lambda: nn.Linear(4, 2), X, {"batch_size": 0}, InvalidRequestError, "batch_size"),
    "memory": (lambda: nn.Linear(4, 2), X, {"memory": "30B"}, InvalidRequestError, "memory"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_is_refused_in_one_line(name):
    made, inputs, options, error, pattern = REFUSALS[name]
    with pytest.raises(error, match=pattern) as refused:
        jacstore.torch.build(made(), inputs, None, **options)
    assert "\n" not in str(refused.value) and refused.value.exit_code == 2

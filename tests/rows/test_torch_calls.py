"""Modules of PyTorch that act otherwise than their classes say, or otherwise for some examples: rows are autograd's.

Skipped where torch is not installed.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

import numpy as np
import pytest

import jacstore
from jacstore.errors import InvalidFunctionError
from jacstore.testing import row_error

torch = pytest.importorskip("torch")
from tests.rows.test_torch import Function, rows_of, terms_of, truth  # noqa: E402

nn, functional = torch.nn, torch.nn.functional
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _small_leaves_count(limits):
    limits(smallest_factored=0)
    torch.manual_seed(0)


class Clamped(nn.Linear):
    """Clamps what goes in, which shows in large inputs only."""

    def forward(self, x):
        return functional.linear(x.clamp(-3, 3), self.weight, self.bias)


def later_are_large(width):
    x = torch.randn(6, width)
    x[3:] *= 20
    return x


def clamped():
    return nn.Sequential(Clamped(12, 40), nn.Tanh(), nn.Linear(40, 3)), later_are_large(12), "dot dot dot dot"


def hooked():
    module = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    module[0].register_forward_hook(lambda m, given, output: output.clamp(-3, 3))
    return module, later_are_large(12), "dot dot dot dot"


def hooked_before():
    module = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    module[0].register_forward_pre_hook(lambda m, given: (given[0].clamp(-3, 3),))
    return module, later_are_large(12), "dot dot dot dot"


def replaced_forward():
    module = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    layer = module[0]
    layer.forward = lambda x: functional.linear(x.clamp(-3, 3), layer.weight, layer.bias).clamp(-5, 5)
    return module, later_are_large(12), "dot dot dot dot"


def parametrized():
    module = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    nn.utils.parametrizations.weight_norm(module[0])
    return module, later_are_large(12), "dense dense dense dot dot"


def branching(threshold=5.0):
    def forward(m, x):
        y = torch.tanh(m.a(x))
        return m.head(torch.tanh(m.a(y)) if bool(x.abs().mean() > threshold) else y)

    module = Function(forward, a=nn.Linear(12, 12), head=nn.Linear(12, 3))
    return module, later_are_large(12), "dense dense dot dot"


def used_once_more():
    def forward(m, x):
        y = torch.tanh(m.a(x))
        return m.head(y + m.a.weight.sum(0) if bool(x.abs().mean() > 5) else y)

    module = Function(forward, a=nn.Linear(12, 12), head=nn.Linear(12, 3))
    return module, later_are_large(12), "dense dense dot dot"


def experts():
    def forward(m, x):
        best = int(m.gate(x)[0].argmax())
        return m.head(torch.tanh((m.one if best == 0 else m.two)(x)))

    layers = {"gate": nn.Linear(8, 2), "one": nn.Linear(8, 9), "two": nn.Linear(8, 9), "head": nn.Linear(9, 3)}
    return Function(forward, **layers), torch.randn(8, 8), "dot dot dense dense dense dense dot dot"


def checkpointed():
    from torch.utils.checkpoint import checkpoint

    def forward(m, x):
        return m.head(checkpoint(lambda y: torch.tanh(m.a(y)), x, use_reentrant=False))

    return Function(forward, a=nn.Linear(8, 9), head=nn.Linear(9, 3)), torch.randn(5, 8), None


def prelu():
    module = nn.Sequential(nn.Conv1d(2, 3, 2), nn.PReLU(3), nn.Flatten(), nn.Linear(12, 3))
    return module, torch.randn(5, 2, 5), None


class Outputs(OrderedDict):
    """Like the outputs of Hugging Face: a dict that is no plain one."""


@dataclasses.dataclass
class Record:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


def named_outputs():
    def forward(m, x):
        return Outputs(logits=m.a(x), more=Record(logits=m.b(x)), cache=None)

    return Function(forward, a=nn.Linear(8, 9), b=nn.Linear(8, 2)), torch.randn(5, 8), "dot dot dot dot"


class Conv1D(nn.Module):
    """The layer of GPT-2: a weight `(in, out)`."""

    def __init__(self, width, size):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(size, width) / 3), nn.Parameter(torch.randn(width))

    def forward(self, x):
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], -1)


def conv1d():
    module = Function(lambda m, x: m.b(torch.tanh(m.a(x))).mean(1), a=Conv1D(20, 8), b=Conv1D(3, 20))
    return module, torch.randn(5, 4, 8), "dot dot dot dot"


def transposed():
    module = Function(
        lambda m, x: torch.tanh(functional.linear(x @ m.a, m.b.T) @ m.c.t()),
        a=nn.Parameter(torch.randn(8, 20)),
        b=nn.Parameter(torch.randn(20, 12)),
        c=nn.Parameter(torch.randn(3, 12)),
    )
    return module, torch.randn(5, 8), "dot dot dot"


MODULES = {
    function.__name__: function
    for function in (
        clamped, hooked, hooked_before, replaced_forward, parametrized, branching, used_once_more, experts,
        checkpointed, prelu, named_outputs, conv1d, transposed,
    )
}  # fmt: skip


@pytest.mark.parametrize("layout", ["auto", "dense"])
@pytest.mark.parametrize("name", MODULES)
def test_rows_are_those_of_autograd_for_every_example(name, layout):
    module, inputs, terms = MODULES[name]()
    store = jacstore.torch.build(module, inputs, None, dtype="float64", layout=layout, batch_size=2)
    if layout == "auto" and terms:
        assert terms_of(store) == terms
    wanted = truth(PLAIN[name](module), inputs) if name in PLAIN else truth(module, inputs)
    for found, row in zip(np.split(rows_of(store), len(wanted)), wanted, strict=True):
        assert row_error(found, row) <= 1e-12


def test_rows_that_are_computed_again_for_their_gradient_are_verified_in_float64():
    module, inputs, _ = checkpointed()
    store = jacstore.torch.build(module, inputs, None)
    report = jacstore.verify(store, jacstore.torch.TorchProblem(module=module, inputs=inputs), full=True)
    assert report.ok and report.check("rows").state == "ok"
    assert module.a.weight.dtype == torch.float32 and module.a.weight.requires_grad


# The same networks as the truth can take them.
PLAIN = {
    "named_outputs": lambda module: Function(lambda m, x: (m.a(x), m.b(x)), a=module.a, b=module.b),
    "checkpointed": lambda module: Function(lambda m, x: m.head(torch.tanh(m.a(x))), a=module.a, head=module.head),
}


def rare(at):
    """A module that takes its weight once more for inputs whose first entry is large: those of example `at`."""

    def forward(m, x):
        y = torch.tanh(m.a(x))
        return m.head(y + m.a.weight.sum(0) if bool(x[0, 0] > 50) else y)

    x = torch.randn(400, 4)
    x[at, 0] = 100
    return Function(forward, a=nn.Linear(4, 4), head=nn.Linear(4, 2)), x


def test_terms_found_wrong_in_the_first_unit_become_rows_and_stay_so_when_continued(tmp_path, limits):
    limits(audit_unnoticed_seconds=1e9, audit_first=1000)
    module, inputs = rare(20)
    store = jacstore.torch.build(module, inputs, tmp_path / "s", dtype="float64", unit_size=200)
    assert terms_of(store) == "dense dense dot dot" and store.report["examples_audited"] >= 200
    assert row_error(rows_of(store), truth(module, inputs).reshape(800, -1)) <= 1e-12
    again = jacstore.torch.build(module, inputs, tmp_path / "s", dtype="float64", unit_size=200)
    assert again.report["units_reused"] == 2


def test_terms_found_wrong_after_units_are_stored_end_the_build_naming_parameter_and_example(tmp_path, limits):
    limits(audit_unnoticed_seconds=1e9, audit_first=1000)
    module, inputs = rare(250)
    with pytest.raises(InvalidFunctionError, match=r"'a.weight' .* example 250 .*layout='dense'"):
        jacstore.torch.build(module, inputs, tmp_path / "s", unit_size=100)


def test_every_unit_is_compared_with_autograd_whatever_it_takes(limits):
    limits(audit_unnoticed_seconds=0, audit_share=0)
    module, inputs = nn.Linear(4, 2), torch.randn(40, 4)
    store = jacstore.torch.build(module, inputs, None, unit_size=5, batch_size=5)
    assert 8 <= store.report["examples_audited"] <= 9


def test_factors_that_come_out_wrong_are_found_and_rows_are_stored_instead(monkeypatch):
    from jacstore.rows.torch.device_pass import TorchPass

    run = TorchPass.run

    def off(self, examples):
        for rows in run(self, examples):
            for name, values in rows.factors.items():
                if name.startswith("cotangents"):
                    np.multiply(values, 1.5, out=values)
            yield rows

    monkeypatch.setattr(TorchPass, "run", off)
    module, inputs = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2)), torch.randn(6, 4)
    store = jacstore.torch.build(module, inputs, None, dtype="float64")
    assert terms_of(store) == "dense dense dense dense"
    assert row_error(rows_of(store), truth(module, inputs).reshape(12, -1)) <= 1e-12


class Narrow(nn.Module):
    """A float32 body that hands out float64, and one under autocast."""

    def __init__(self, autocast):
        super().__init__()
        self.a, self.b, self.autocast = nn.Linear(64, 300), nn.Linear(300, 3), autocast

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            y = self.b(torch.tanh(self.a(x)))
        return y.double()


@pytest.mark.parametrize("autocast", [False, True])
def test_tolerances_are_those_of_the_lowest_precision(autocast):
    module, inputs = Narrow(autocast), torch.randn(6, 64)
    store = jacstore.torch.build(module, inputs, None)
    assert terms_of(store) == "dot dot dot dot" and store.lowest == ("bfloat16" if autocast else "float32")
    plain = Narrow(False)
    plain.load_state_dict(module.state_dict())
    assert row_error(rows_of(store), truth(plain, inputs).reshape(18, -1)) <= (0.05 if autocast else 1e-5)

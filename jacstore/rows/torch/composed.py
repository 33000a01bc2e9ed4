"""Split calls of torch that multiply several parameters into calls that are one product each.

A recurrent layer is one call for all layers, directions and steps; here every product with a weight becomes a call of
`linear`, which a torch mode sees. Attention is a function that hands itself to a mode as a whole; its body is run
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional

States = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Composed:
    """A call that is made of several products: the parameters that it is given, and the call written out."""

    parameters: Sequence[Any]
    run: Callable[[], Any]


def compose(function: Any, arguments: Any, keywords: Any) -> Composed | None:
    """A call as one of several products, if it is known to be one."""
    known = _KNOWN.get(function)
    try:
        return known(*arguments, **keywords) if known else None
    except TypeError:
        return None  # other arguments than these


# ---------------------------------------------------------------------------------------------------- recurrent layers


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A recurrent layer: blocks of rows of its weights, states that it carries, and its step.

    `step` takes the products with the input and with the state, both `(n, gates * width)`, and the old states, and
    returns the new states, the output first.
    """

    gates: int
    states: int
    step: Callable[[torch.Tensor, torch.Tensor, States], States]


def _lstm(given: torch.Tensor, back: torch.Tensor, states: States) -> States:
    """Hochreiter and Schmidhuber (1997), with a forget gate."""
    i, f, g, o = (given + back).chunk(4, -1)
    cell = torch.sigmoid(f) * states[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru(given: torch.Tensor, back: torch.Tensor, states: States) -> States:
    """Cho et al. (2014, arXiv:1406.1078), the reset gate after the product as torch has it."""
    (r, z, n), (r_back, z_back, n_back) = given.chunk(3, -1), back.chunk(3, -1)
    new = torch.tanh(n + torch.sigmoid(r + r_back) * n_back)
    keep = torch.sigmoid(z + z_back)
    return ((1 - keep) * new + keep * states[0],)


_LSTM = _Kind(gates=4, states=2, step=_lstm)
_GRU = _Kind(gates=3, states=1, step=_gru)
_TANH = _Kind(gates=1, states=1, step=lambda given, back, states: (torch.tanh(given + back),))
_RELU = _Kind(gates=1, states=1, step=lambda given, back, states: (torch.relu(given + back),))


def _recurrence(kind: _Kind) -> Callable[..., Composed | None]:
    """A call for whole sequences."""

    def written_out(
        given: Any,
        states: Any,
        weights: Any,
        has_biases: Any,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Composed | None:
        before = _states(kind, states)
        # Packed sequences have the same number of arguments, but different ones.
        if not isinstance(has_biases, bool) or before is None or (train and dropout) or given.dim() != 3:
            return None
        count, each = num_layers * (2 if bidirectional else 1), 4 if has_biases else 2
        # A projection of the states has one weight more.
        if len(weights) != count * each or any(s.dim() != 3 or s.shape[0] != count for s in before):
            return None
        cells = [(*weights[n : n + each], None, None)[:4] for n in range(0, len(weights), each)]

        def run() -> States:
            x, after = given.transpose(0, 1) if batch_first else given, []
            for layer in range(num_layers):
                made = []
                for n in range(layer * count // num_layers, (layer + 1) * count // num_layers):
                    backwards = bidirectional and n % 2 == 1
                    output, last = _sequence(kind, cells[n], x, tuple(s[n] for s in before), backwards)
                    made.append(output)
                    after.append(last)
                x = torch.cat(made, -1) if len(made) > 1 else made[0]
            x = x.transpose(0, 1) if batch_first else x
            return x, *(torch.stack(parts) for parts in zip(*after, strict=True))

        return Composed(parameters=weights, run=run)

    return written_out


def _sequence(
    kind: _Kind, cell: Sequence[Any], x: torch.Tensor, states: States, backwards: bool
) -> tuple[torch.Tensor, States]:
    """Outputs `(T, n, width)` of one layer in one direction, and its last states."""
    w_given, w_back, b_given, b_back = cell
    given = functional.linear(x, w_given, b_given)
    outputs = []
    steps = range(len(x))
    for t in reversed(steps) if backwards else steps:
        states = kind.step(given[t], functional.linear(states[0], w_back, b_back), states)
        outputs.append(states[0])
    return torch.stack(outputs[::-1] if backwards else outputs), states


def _cell(kind: _Kind) -> Callable[..., Composed | None]:
    """A call for one step."""

    def written_out(
        given: Any, states: Any, w_given: Any, w_back: Any, b_given: Any = None, b_back: Any = None
    ) -> Composed | None:
        before = _states(kind, states)
        if before is None:
            return None

        def run() -> Any:
            x, back = functional.linear(given, w_given, b_given), functional.linear(before[0], w_back, b_back)
            after = kind.step(x, back, before)
            return after if kind.states > 1 else after[0]

        return Composed(parameters=(w_given, w_back, b_given, b_back), run=run)

    return written_out


def _states(kind: _Kind, given: Any) -> States | None:
    """The states that a call is given, if their number is right."""
    states = (given,) if isinstance(given, torch.Tensor) else tuple(given)
    right = len(states) == kind.states and all(isinstance(s, torch.Tensor) for s in states)
    return states if right else None


# ----------------------------------------------------------------------------------------------------------- attention


def _body(function: Any) -> Any:
    """A function of torch that does not ask first whether a mode wants it; the calls within it still do."""
    code = getattr(function, "__code__", None)
    if code is None or function.__closure__ or "has_torch_function" not in code.co_names:
        return None
    known = {**function.__globals__, "has_torch_function": lambda tensors: False}
    body = FunctionType(code, known, function.__name__, function.__defaults__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def _whole(function: Any) -> Callable[..., Composed | None]:
    """A call of a function whose products are in its body."""
    body = _body(function)

    def written_out(*arguments: Any, **keywords: Any) -> Composed | None:
        if body is None:
            return None
        return Composed(parameters=(*arguments, *keywords.values()), run=lambda: body(*arguments, **keywords))

    return written_out


_KNOWN: dict[Any, Callable[..., Composed | None]] = {
    torch.lstm: _recurrence(_LSTM),
    torch.gru: _recurrence(_GRU),
    torch.rnn_tanh: _recurrence(_TANH),
    torch.rnn_relu: _recurrence(_RELU),
    torch.lstm_cell: _cell(_LSTM),
    torch.gru_cell: _cell(_GRU),
    torch.rnn_tanh_cell: _cell(_TANH),
    torch.rnn_relu_cell: _cell(_RELU),
    functional.multi_head_attention_forward: _whole(functional.multi_head_attention_forward),
}

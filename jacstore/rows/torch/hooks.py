"""Record the layers of a module as they are called, and the operands that they store.

A torch mode sees every call that multiplies a parameter, whichever module makes it, keeps the call's input and adds a
zero to its output: the cotangent of that zero is the call's cotangent, whatever is done in place afterwards. While
layers are looked for, such calls get detached parameters: a parameter that autograd's graph still reaches is used in
another way too, and is stored as rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jacstore.errors import JacstoreError
from jacstore.rows.torch.calls import Form, Seen, parts, see, transposes
from jacstore.rows.torch.composed import compose
from jacstore.rows.torch.network import Network
from jacstore.terms.kinds import Conv, Dot, Factored, Index, Operand

# Names of weight and bias, if they are selected parameters, and how they are multiplied.
Key = tuple[str | None, str | None, Form]


class Varies(JacstoreError):
    """Raised when a layer is called differently for one example than for another."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(f"{min(names)!r} is used otherwise for one example than for another")
        self.names, self.example = names, 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """A layer: calls of the same kind, `len(outputs)` of them per example.

    Attributes
    ----------
    weight, bias
        Names of the parameters that are multiplied and added, if they are selected.
    outputs
        Zeros shaped as what each call returned, with a batch axis of one.
    shape, dtype
        Of the weight.
    inputs, cotangents
        The operands that all its calls together are stored as; layers that see the same tensors share `inputs`.
    """

    key: Key
    outputs: tuple[torch.Tensor, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    inputs: Operand
    cotangents: Operand

    @property
    def form(self) -> Form:
        """How its calls multiply."""
        return self.key[2]

    @property
    def parameters(self) -> list[tuple[str, bool]]:
        """Names of the layer's parameters, and whether each is a bias."""
        return [(name, n == 1) for n, name in enumerate(self.key[:2]) if name is not None]

    def term(self, bias: bool) -> Factored:
        """The layer's term in the row of its weight or bias."""
        common: dict[str, Any] = {"cotangents": self.cotangents.name, "scale": 1.0}
        width, form = self.cotangents.shape[-1], self.form
        if bias:
            return Dot(inputs=None, views=(), **common)
        if form.kind == "linear":
            turned = (("reshape", (self.inputs.shape[-1], width)), ("transpose", (1, 0)))
            return Dot(inputs=self.inputs.name, views=() if form.flipped else turned, **common)
        if form.kind == "embedding":
            return Index(ids=self.inputs.name, views=(), size=self.shape[0], **common)
        space, window = form.space, self.shape[2:]
        # From jacstore's `(*window, channels / groups, width)` to torch's `(width, channels / groups, *window)`.
        shape = (*window, self.shape[1], width)
        return Conv(
            inputs=self.inputs.name,
            views=(("reshape", shape), ("transpose", (space + 1, space, *range(space)))),
            window=tuple(window),
            positions=tuple(self.outputs[0].shape[-space:]),
            strides=form.strides,
            dilation=form.dilation,
            padding=form.padding,
            spread=(1,) * space,
            groups=form.groups,
            **common,
        )

    def as_inputs(self, given: Sequence[torch.Tensor]) -> torch.Tensor:
        """Inputs of all calls in the form of the operand: positions, one call after the other."""
        return _as_inputs(self.form, given, self.dtype)

    def as_cotangents(self, given: Sequence[torch.Tensor]) -> torch.Tensor:
        """Cotangents of all calls as `(1, T, D)`."""
        return _as_cotangents(self.form, given, self.dtype)


def _as_cotangents(form: Form, given: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    if form.kind == "conv":
        given = [d.movedim(-1 - form.space, -1) for d in given]
    parts = [d.reshape(-1, d.shape[-1]) for d in given]
    joined = torch.cat(parts) if len(parts) > 1 else parts[0]
    if form.before or form.after:
        # Rows of the weight that the calls do not multiply get nothing.
        joined = torch.nn.functional.pad(joined, (form.before, form.after))
    return joined[None].to(dtype)


def _as_inputs(form: Form, given: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    if form.kind == "embedding":
        ids = torch.cat([x.reshape(-1) for x in given]).to(torch.int32)
        # Torch gives the padding's row no gradient.
        return ids if form.padding_idx is None else torch.where(ids == form.padding_idx, -1, ids)
    if form.kind == "linear":
        parts = [x.reshape(-1, x.shape[-1]) for x in given]
        return (torch.cat(parts) if len(parts) > 1 else parts[0])[None].to(dtype)
    images = [(x if x.dim() == form.space + 2 else x[None]).movedim(1, -1) for x in given]
    return (torch.cat(images) if len(images) > 1 else images[0]).to(dtype)


# ----------------------------------------------------------------------------------------------------------------- taps


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A call's input, and the zero that was added to its output."""

    given: torch.Tensor
    zero: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Named:
    """A tensor that is a parameter or its transpose, or some of its rows: `before` and `after` are those it lacks."""

    name: str
    turned: bool = False
    before: int = 0
    after: int = 0

    @property
    def part(self) -> bool:
        """Whether it lacks any rows."""
        return bool(self.before or self.after)


class Taps(TorchFunctionMode):
    """Record calls with a network's parameters inside `running`, in `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Key, list[Call]] = {}
        self._named: dict[int, Named] = {}
        self._kept: list[Any] = []
        self._active: Collection[str] = ()
        self._zeros: Mapping[Key, Sequence[torch.Tensor]] | None = None

    @contextmanager
    def running(
        self,
        parameters: Mapping[str, torch.Tensor],
        zeros: Mapping[Key, Sequence[torch.Tensor]] | None,
        active: Collection[str] = (),
    ) -> Iterator[None]:
        """Record one forward pass, and add zeros to the outputs of calls with the `active` parameters.

        Without zeros, calls are only recorded.
        """
        self._active = active
        self.calls, self._zeros, self._kept = {}, zeros, list(parameters.values())
        self._named = {id(value): Named(name=name) for name, value in parameters.items()}
        try:
            with self:
                yield
        finally:
            # Identities from one pass must not be mistaken for tensors of another.
            self._named, self._kept = {}, []
        for key, given in (zeros or {}).items():
            if len(self.calls.get(key, ())) != len(given):
                raise _varies(key)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        seen = see(function, args, kwargs)
        weight, bias = self._name(seen.weight) if seen else None, self._name(seen.bias) if seen else None
        if seen and (weight or (bias and not bias.turned)):
            return self._product(seen, weight, bias, lambda: function(*args, **kwargs))
        composed = compose(function, args, kwargs)
        if composed and any(self._name(tensor) for tensor in composed.parameters):
            # Torch leaves a mode for as long as it handles a call.
            with self:
                return composed.run()
        found = function(*args, **kwargs)
        of = self._name(args[0]) if args else None
        if of:
            self._follow(of, found, function, args, kwargs)
        return found

    def _follow(self, of: Named, found: Any, function: Any, args: Any, kwargs: Any) -> None:
        """Name the transpose of a parameter, and what holds some of its rows."""
        if transposes(function, args, kwargs) and args[0].dim() == 2:
            self._named[id(found)] = replace(of, turned=not of.turned)
            self._kept.append(found)
            return
        taken = found if isinstance(found, tuple) else (found,)
        for (first, last), part in zip(() if of.turned else parts(function, args, kwargs), taken, strict=False):
            if part.shape == (last - first, *args[0].shape[1:]):
                behind = len(args[0]) - last
                self._named[id(part)] = replace(of, before=of.before + first, after=of.after + behind)
                self._kept.append(part)

    def _name(self, tensor: Any) -> Named | None:
        """The parameter that a tensor is, or is a part of."""
        return self._named.get(id(tensor))

    def _product(self, seen: Seen, weight: Named | None, bias: Named | None, call: Callable[[], Any]) -> torch.Tensor:
        form = seen.form
        if form.kind != "linear" and any(of and (of.turned or of.part) for of in (weight, bias)):
            return call()
        if weight and weight.turned:
            form = replace(form, flipped=not form.flipped)
        if weight and weight.part and form.flipped:
            return call()  # then columns would be what is multiplied
        if bias and seen.bias is not None and seen.bias.shape != (seen.weight.shape[1 if seen.form.flipped else 0],):
            bias = None  # one number for all outputs is repeated before it is added
        keys = [key for key in _keys(form, weight, bias) if self._taken(key)]
        if not keys:
            return call()
        if self._zeros is None:
            output = seen.again(
                seen.weight.detach() if weight else seen.weight,
                seen.bias.detach() if bias and seen.bias is not None else seen.bias,
            )
        else:
            output = call()
        # Under autocast what is multiplied is rounded first.
        given = seen.given if form.kind == "embedding" else seen.given.to(output.dtype)
        for key in keys:
            made = self.calls.setdefault(key, [])
            zero = self._zero(key, len(made), output)
            made.append(Call(given=given, zero=zero, weight=seen.weight))
            output = output + zero
        return output

    def _taken(self, key: Key) -> bool:
        return self._zeros is None or key in self._zeros or bool(set(key[:2]) & set(self._active))

    def _zero(self, key: Key, at: int, output: torch.Tensor) -> torch.Tensor:
        """The zero that is added to the output of a key's call with this number."""
        if self._zeros is None:
            return torch.zeros_like(output).requires_grad_()
        zeros = self._zeros.get(key, ())
        if at >= len(zeros) or output.shape != zeros[at].shape:
            raise _varies(key)
        return zeros[at]


def _keys(form: Form, weight: Named | None, bias: Named | None) -> list[Key]:
    """The keys of a call: weight and bias together, unless they hold different rows."""
    made: dict[Form, list[str | None]] = {}
    for n, of in enumerate((weight, bias)):
        if of:
            made.setdefault(replace(form, before=of.before, after=of.after), [None, None])[n] = of.name
    return [(names[0], names[1], of) for of, names in made.items()]


def _varies(key: Key) -> Varies:
    return Varies({name for name in key[:2] if name is not None})


def find_layers(network: Network, taps: Taps, example: Any) -> tuple[tuple[Layer, ...], set[str]]:
    """Layers that are called for one example, and the parameters that are also used outside such calls.

    The tensors of `network.selected` have to require a gradient.
    """
    with taps.running(network.selected, None):
        outputs = network({}, example)
    reached = _reached(outputs)
    names: dict[Any, Operand] = {}
    layers: list[Layer] = []
    for key, calls in taps.calls.items():
        form, inputs = key[2], [call.given for call in calls]
        if form.kind == "conv" and len({x.shape[-form.space :] for x in inputs}) > 1:
            continue  # images of different sizes are no one operand
        value = network.selected[next(name for name in key[:2] if name is not None)]
        formed = _as_inputs(form, inputs, value.dtype)
        role = "ids" if form.kind == "embedding" else "inputs"
        # Calls hold their inputs, so that these are identities of living tensors.
        same = (tuple(id(x) for x in inputs), tuple(formed.shape), form.padding_idx, value.dtype)
        zeros = tuple(call.zero.detach() for call in calls)
        cotangents = _as_cotangents(form, zeros, value.dtype)
        layers.append(
            Layer(
                key=key,
                outputs=zeros,
                shape=tuple(calls[0].weight.shape if key[0] is None else network.selected[key[0]].shape),
                dtype=value.dtype,
                inputs=names.setdefault(
                    same, Operand(name=f"{role}{len(names)}", role=role, shape=tuple(formed.shape))
                ),
                cotangents=Operand(name=f"cotangents{len(layers)}", role="cotangents", shape=tuple(cotangents.shape)),
            )
        )
    return tuple(layers), {name for name, value in network.selected.items() if id(value) in reached}


def _reached(outputs: torch.Tensor) -> set[int]:
    """Identities of the leaf tensors that autograd's graph reaches."""
    leaves: set[int] = set()
    nodes: set[Any] = {outputs.grad_fn}
    todo = [outputs.grad_fn]
    while todo:
        for node, _ in getattr(todo.pop(), "next_functions", ()):
            variable = getattr(node, "variable", None)
            if variable is not None:
                leaves.add(id(variable))
            elif node is not None and node not in nodes:
                nodes.add(node)
                todo.append(node)
    return leaves

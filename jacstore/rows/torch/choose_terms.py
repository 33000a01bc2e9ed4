"""Choose the terms of every parameter leaf of a module, and form rows from operands as tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from jacstore.base.limits import LIMITS
from jacstore.rows.torch.hooks import Key, Layer
from jacstore.rows.torch.network import Network, path_of
from jacstore.terms.kinds import Dense, Factored, Leaf, Operand, Term

# Why a leaf has no terms that had some until an example showed that they are not its gradient.
WRONG = "its layer's products are not its gradient"


@dataclass(frozen=True, kw_only=True)
class ChosenTerms:
    """The leaves and operands that are stored for a network, and the layers to compute them.

    Attributes
    ----------
    leaves, operands
        The leaves and operands of the store.
    rows
        For each leaf stored as rows its terms, from which they are formed, or none: then `torch.func` gives them.
    layers
        The layers whose operands are needed.
    """

    leaves: tuple[Leaf, ...]
    operands: tuple[Operand, ...]
    rows: dict[str, tuple[Factored, ...]]
    layers: tuple[Layer, ...]

    @property
    def generic(self) -> tuple[str, ...]:
        """Names of the parameters whose rows `torch.func` gives."""
        return tuple(name for name, terms in self.rows.items() if not terms)


def choose_terms(
    network: Network,
    layers: Sequence[Layer],
    outside: Collection[str],
    n_outputs: int,
    layout: str,
    wrong: Collection[str],
) -> ChosenTerms:
    """Terms of every leaf by the rules of `layout`; parameters in `wrong` are left to `torch.func`."""
    uses: dict[str, list[tuple[Layer, bool]]] = {name: [] for name in network.selected}
    for layer in layers:
        for name, bias in layer.parameters:
            uses[name].append((layer, bias))
    reasons = {name: _reason(uses[name], name in outside, name in wrong) for name in uses}
    known = {name: [] if reasons[name] else made for name, made in uses.items()}
    chosen: dict[str, bool] = {}
    stored: set[Key] = set()
    for biases in (False, True):
        for name, made in known.items():
            if made and made[0][1] == biases:
                chosen[name], reasons[name] = _pays(network.selected[name], made, n_outputs, layout, stored)
                stored |= {layer.key for layer, _ in made if chosen[name] and not biases}
    leaves: list[Leaf] = []
    rows: dict[str, tuple[Factored, ...]] = {}
    start = offset = 0
    for name, value in network.selected.items():
        factored = tuple(layer.term(bias) for layer, bias in known[name])
        terms: tuple[Term, ...] = factored
        if not chosen.get(name):
            rows[name] = factored
            terms = (Dense(start=start, size=value.numel()),)
            start += value.numel()
        leaves.append(
            Leaf(
                path=path_of(name),
                shape=tuple(value.shape),
                dtype=str(value.dtype).removeprefix("torch."),
                offset=offset,
                terms=terms,
                why=reasons[name],
            )
        )
        offset += value.numel()
    named = {operand.name: operand for layer in layers for operand in (layer.inputs, layer.cotangents)}
    kept = dict.fromkeys(name for leaf in leaves for name in leaf.operands)
    needed = {layer.key for made in known.values() for layer, _ in made}
    return ChosenTerms(
        leaves=tuple(leaves),
        operands=tuple(named[name] for name in kept),
        rows=rows,
        layers=tuple(layer for layer in layers if layer.key in needed),
    )


def _reason(uses: Sequence[tuple[Layer, bool]], outside: bool, wrong: bool) -> str:
    """The reason why a parameter has no terms; empty if it has."""
    if not uses:
        return "not of a layer with factors"
    if outside:
        return "used outside its layer"
    if wrong:
        return WRONG
    terms = [layer.term(bias) for layer, bias in uses]
    images = {layer.inputs.shape[1:] for layer, _ in uses if layer.form.kind == "conv"}
    geometries = {term.geometry for term in terms if term.geometry}
    if len({bias for _, bias in uses}) > 1 or len(images) > 1 or len(geometries) > 1:
        return "terms of unlike kinds"
    return ""


def _pays(
    value: torch.Tensor, uses: Sequence[tuple[Layer, bool]], n_outputs: int, layout: str, stored: set[Key]
) -> tuple[bool, str]:
    """Whether a leaf is stored by its factors, and why."""
    if layout == "dense":
        return False, "layout dense"
    if uses[0][1]:
        kept = all(layer.key in stored for layer, _ in uses)
        return kept, "its layer's cotangents" if kept else "its layer is stored as rows"
    numbers = sum(o.numbers(n_outputs) for layer, _ in uses for o in (layer.inputs, layer.cotangents))
    size = n_outputs * value.numel()
    smaller_by = uses[0][0].term(bias=False).smaller_by
    take = layout == "factored" or LIMITS.smallest_factored <= size > smaller_by * numbers
    return take, f"{numbers:,} numbers against {size:,}"


# -------------------------------------------------------------------------------------------------- rows from operands


def form_rows(terms: Sequence[Factored], operands: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A leaf's rows `(n, K, size)` in torch's order, from operands `(n, ...)` and `(n, K, ...)`, on their device.

    All outputs are columns of one product per example; separate products for each output take many times longer.
    """
    total = sum(term.rows_in_torch(operands, torch) for term in terms)
    assert isinstance(total, torch.Tensor)
    return total

"""The steps in which factored leaves are contracted, and for each leaf the cheaper way to do it.

A step is a set of leaves that share factors, so that each factor is read once. A leaf is contracted implicitly, by
products of all pairs of positions, or its rows are formed a few channels at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jacstore.base.modes import Mode
from jacstore.kernels.plan.plan import Step
from jacstore.kernels.plan.rates import Rates
from jacstore.terms.kinds import Leaf, Operand
from jacstore.terms.row_products import inside_flops, own_rows_are_smaller


def plan_steps(
    leaves: Sequence[Leaf],
    operands: Sequence[Operand],
    n_outputs: int,
    n_examples: int,
    mode: Mode,
    rates: Rates | None = None,
) -> tuple[Step, ...]:
    """Steps over the factored leaves, in the order of their first leaves.

    Each leaf is contracted in the way that takes less time at these rates; operations are counted at the usual ones.
    """
    chosen_by = rates or Rates()
    by_name = {operand.name: operand for operand in operands}
    steps = []
    for members, names in sharing(leaves):
        joined = _joined_costs(leaves, members, by_name)
        costs, weighed = (
            {n: _costs(leaves[n], by_name, n_outputs, mode, weights, joined.get(n)) for n in members}
            for weights in (Rates(), chosen_by)
        )
        expanded = tuple(n for n in members if expanding_pays(weighed[n], n_examples))
        rows_flops = {n: costs[n][1] for n in expanded}
        positions = max(
            (
                _positions(leaves[n], by_name, n_outputs, mode)
                for n in members
                if n not in expanded and not _simple(leaves[n], by_name)
            ),
            default=1,
        )
        steps.append(
            Step(
                leaves=members,
                expanded=expanded,
                numbers=sum(by_name[name].numbers(n_outputs) for name in names),
                channel_columns=max((channel_columns(leaves[n], by_name) for n in expanded), default=0),
                patch_numbers=max((_patch_numbers(leaves[n], by_name) for n in expanded), default=0),
                positions=positions,
                flops_pair=sum(rows_flops.get(n, costs[n][0]) for n in members),
                flops_example=sum(costs[n][2] for n in expanded),
            )
        )
    return tuple(steps)


def _joined_costs(leaves: Sequence[Leaf], members: Sequence[int], operands: dict[str, Operand]) -> dict[int, int]:
    """Operations for a pair of examples of leaves whose inputs are multiplied beside those of an earlier leaf.

    Such as a bias: its layer's product of cotangents is formed once, and its inputs are one more column, of ones.
    """
    seen, found = set(), {}
    for n in members:
        if not _simple(leaves[n], operands):
            continue
        *inputs, cotangents = leaves[n].operands
        if cotangents in seen:
            found[n] = 2 * (operands[inputs[0]].shape[-1] if inputs else 1)
        seen.add(cotangents)
    return found


def expanding_pays(costs: tuple[int, int, int], n_examples: int) -> bool:
    """Whether forming a leaf's rows takes fewer operations than products of all pairs of positions."""
    implicit, expanded, example = costs
    return expanded + 2 * example / n_examples < implicit


def sharing(leaves: Sequence[Leaf]) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Sets of factored leaves that share operands, in the order of their first leaves, with the operands' names."""
    sets: list[tuple[list[int], set[str]]] = []
    for index, leaf in enumerate(leaves):
        if leaf.dense or not leaf.size:
            continue
        members, names = [index], set(leaf.operands)
        for other in [s for s in sets if s[1] & names]:
            sets.remove(other)
            members, names = other[0] + members, other[1] | names
        sets.append((members, names))
    return [(tuple(sorted(m)), tuple(sorted(names))) for m, names in sorted(sets, key=lambda entry: min(entry[0]))]


def channel_columns(leaf: Leaf, operands: dict[str, Operand]) -> int:
    """Columns of a leaf's rows that one channel of its cotangents makes."""
    return leaf.size // _cotangents(leaf, operands)[2]


def _cotangents(leaf: Leaf, operands: dict[str, Operand]) -> tuple[int, ...]:
    return operands[leaf.factored[0].cotangents].shape


def _shapes(leaf: Leaf, operands: dict[str, Operand]) -> dict[str, tuple[int, ...]]:
    return {name: operands[name].shape for name in leaf.operands}


def _patch_numbers(leaf: Leaf, operands: dict[str, Operand]) -> int:
    """Numbers of the patches that a leaf's convolutions cut the images of an example into."""
    shapes = _shapes(leaf, operands)
    positions = sum(term.patch_positions(shapes) for term in leaf.factored)
    return positions * leaf.size // _cotangents(leaf, operands)[2]


def _positions(leaf: Leaf, operands: dict[str, Operand], n_outputs: int, mode: Mode) -> int:
    """The most positions, or pixels, that products of this leaf run over; for patches and rows what takes as much."""
    shapes = _shapes(leaf, operands)
    positions = {name: operands[name].shape[-2] for name in leaf.operands if operands[name].per_output}
    if mode.within_examples and own_rows_are_smaller(leaf, positions, n_outputs):
        numbers = max(term.most_numbers(leaf.size) for term in leaf.factored)
        return math.isqrt(3 * numbers // n_outputs) + 1
    return max(1, *(term.most_positions(shapes) for term in leaf.factored))


def _simple(leaf: Leaf, operands: dict[str, Operand]) -> bool:
    """Whether a product of two rows is one product of inputs times one of cotangents."""
    return len(leaf.terms) == 1 and leaf.factored[0].is_simple and _cotangents(leaf, operands)[:2] == (1, 1)


def _costs(
    leaf: Leaf, operands: dict[str, Operand], n_outputs: int, mode: Mode, rates: Rates, joined: int | None
) -> tuple[int, int, int]:
    """Multiplications and additions: implicit for a pair of examples, expanded for a pair, expanding for an example.

    `joined` is the first of them where a leaf is multiplied beside an earlier one.
    """
    outputs = mode.output_pairs(n_outputs)
    shapes = _shapes(leaf, operands)
    if any(term.formed for term in leaf.factored):
        rows = 2 * leaf.size * outputs
        example = sum(2 * shapes[term.cotangents][1] * term.most_numbers(leaf.size) for term in leaf.factored)
        return (rows if mode.within_examples else 2**62), rows, example * n_outputs * rates.expanding
    implicit = example = 0
    for p in leaf.factored:
        groups, t, width = shapes[p.cotangents]
        example += 2 * t * leaf.size * n_outputs * rates.expanding
        for q in leaf.factored:
            s = shapes[q.cotangents][1]
            inside = inside_flops(p, q, shapes, rates.elementwise)
            # A sum over positions is formed before anything is multiplied.
            pairs = t * s if inside is not None else 1
            by_number = rates.elementwise * groups * pairs * outputs
            implicit += 2 * groups * pairs * width * outputs + by_number + (inside or 0)
    implicit = implicit if joined is None else joined
    expandable = all(term.in_slabs for term in leaf.factored)
    if mode.within_examples or _simple(leaf, operands) or not expandable:
        return implicit, 2**62, example
    return implicit, 2 * leaf.size * outputs, example

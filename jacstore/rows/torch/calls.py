"""Recognise calls of torch functions that are a product of a weight and an input.

The call itself counts, not the class of the layer that makes it: a subclass, a hook or a function of the user's own
changes what goes into the call, and that is what is seen here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a call multiplies: all that decides its terms, apart from shapes.

    Attributes
    ----------
    kind
        linear, conv or embedding.
    flipped
        For linear, whether the weight is `(in, out)`.
    strides, padding, dilation, groups
        For conv; `padding` is the number of zeros before the first pixel of each axis.
    padding_idx
        For embedding, the row that gets no gradient.
    before, after
        For linear with a part of a weight or bias, the number of rows before and after that part.
    """

    kind: str
    flipped: bool = False
    strides: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    padding_idx: int | None = None
    before: int = 0
    after: int = 0

    @property
    def space(self) -> int:
        """Axes of a convolution's images."""
        return len(self.strides)


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """A call: its input, the tensors given as weight and bias, and a way to repeat it with others."""

    form: Form
    given: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    again: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


def _linear(given: Any, weight: Any, bias: Any = None) -> Seen | None:
    if weight.dim() != 2:
        return None
    form = Form(kind="linear")
    return Seen(form=form, given=given, weight=weight, bias=bias, again=lambda w, b: functional.linear(given, w, b))


def _matmul(given: Any, weight: Any) -> Seen | None:
    if not (isinstance(given, torch.Tensor) and isinstance(weight, torch.Tensor)):
        return None
    if given.dim() < 2 or weight.dim() != 2:
        return None
    form = Form(kind="linear", flipped=True)
    return Seen(form=form, given=given, weight=weight, bias=None, again=lambda w, b: torch.matmul(given, w))


def _addmm(bias: Any, given: Any, weight: Any, *, beta: Any = 1, alpha: Any = 1) -> Seen | None:
    if bias.dim() != 1 or (beta, alpha) != (1, 1):
        return None
    form = Form(kind="linear", flipped=True)

    def again(w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        return torch.addmm(bias if b is None else b, given, w)

    return Seen(form=form, given=given, weight=weight, bias=bias, again=again)


def _convolution(called: Callable[..., Any], space: int) -> Callable[..., Seen | None]:
    def see(
        given: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> Seen | None:
        strides, apart = _each(stride, space), _each(dilation, space)
        if padding == "valid":
            low = (0,) * space
        elif padding == "same":
            # An odd zero stands behind the last pixel.
            low = tuple(d * (k - 1) // 2 for d, k in zip(apart, weight.shape[2:], strict=True))
        else:
            low = _each(padding, space)
        form = Form(kind="conv", strides=strides, padding=low, dilation=apart, groups=groups)
        return Seen(
            form=form,
            given=given,
            weight=weight,
            bias=bias,
            again=lambda w, b: called(given, w, b, stride, padding, dilation, groups),
        )

    return see


def _each(given: Any, space: int) -> tuple[int, ...]:
    """One number for all axes, alone or in a sequence, or one for each."""
    numbers = (given,) if isinstance(given, int) else tuple(given)
    return numbers * space if len(numbers) == 1 else numbers


def _embedding(
    given: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Seen | None:
    if max_norm is not None or scale_grad_by_freq:
        return None
    row = padding_idx if padding_idx is None or padding_idx >= 0 else padding_idx + len(weight)
    return Seen(
        form=Form(kind="embedding", padding_idx=row),
        given=given,
        weight=weight,
        bias=None,
        again=lambda w, b: functional.embedding(given, w, padding_idx),
    )


def see(function: Any, arguments: Any, keywords: Any) -> Seen | None:
    """The product that a call computes, if it is a product with a weight."""
    known = _KNOWN.get(function)
    try:
        return known(*arguments, **keywords) if known else None
    except TypeError:
        return None  # other arguments than these, such as `out=`


_KNOWN: dict[Any, Callable[..., Seen | None]] = {
    functional.linear: _linear,
    functional.embedding: _embedding,
    torch.addmm: _addmm,
    **{f: _matmul for f in (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)},
    torch.conv1d: _convolution(torch.conv1d, 1),
    torch.conv2d: _convolution(torch.conv2d, 2),
    torch.conv3d: _convolution(torch.conv3d, 3),
}


def transposes(function: Any, arguments: Any, keywords: Any) -> bool:
    """Whether a call is the transpose of its first argument, a matrix."""
    if keywords or not isinstance(arguments[0], torch.Tensor):
        return False
    if function in _TRANSPOSES:
        return True
    swaps = (torch.transpose, torch.Tensor.transpose, torch.swapaxes, torch.Tensor.swapaxes)
    return function in swaps and {n % 2 for n in arguments[1:] if isinstance(n, int)} == {0, 1}


_TRANSPOSES = (torch.t, torch.Tensor.t, *(getattr(torch.Tensor, name).__get__ for name in ("T", "mT")))


def parts(function: Any, arguments: Any, keywords: Any) -> list[tuple[int, int]]:
    """The rows, first to last, of a call's first argument that each tensor it returns holds; empty for other calls.

    The same call on an array of row numbers tells which rows they are; shapes tell whether columns are whole.
    """
    whole = arguments[0]
    if function not in _PARTS or not isinstance(whole, torch.Tensor) or not whole.dim():
        return []
    try:
        taken = function(torch.arange(len(whole)), *arguments[1:], **keywords)
    except (IndexError, RuntimeError, TypeError):
        return []
    ranges = []
    for rows in taken if isinstance(taken, tuple) else (taken,):
        numbers = rows.tolist() if rows.dim() == 1 else []
        if not numbers or numbers != list(range(numbers[0], numbers[-1] + 1)):
            return []
        ranges.append((numbers[0], numbers[-1] + 1))
    return ranges


_PARTS = (
    torch.Tensor.__getitem__,
    *(getattr(of, name) for of in (torch, torch.Tensor) for name in ("split", "chunk", "narrow", "tensor_split")),
)

"""Problems of equinox modules in one line; needs the extra `equinox`.

import jacstore.equinox

problem = jacstore.equinox.equinox_problem(model, x)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jacstore.errors import InvalidRequestError
from jacstore.problem.problem import Problem
from jacstore.problem.user_errors import kind_of

try:
    import equinox as eqx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"jacstore.equinox needs equinox ({error}): pip install 'jacstore[equinox]'") from error

__all__ = ["equinox_problem"]


def equinox_problem(
    model: Callable[..., Any],
    inputs: Any,
    *,
    state: eqx.nn.State | None = None,
    wrt: Any = eqx.is_inexact_array,
    batched: bool = False,
    outputs: str | Sequence[int] = "all",
    select: str | Callable[[str], bool] | None = None,
    **arguments: Any,
) -> Problem:
    """The `Problem` of an equinox module in inference mode, whatever the mode of `model`, which stays as it is.

    Parameters
    ----------
    model
        An `equinox.Module` that is called with one example.
    state
        Of a stateful model, such as one with batch normalisation: the model is called with `(x, state)`, and the first
        of what it returns is differentiated.
    wrt
        The leaves that the Jacobian has columns for, as `equinox.partition` takes them: a function of a leaf, or a
        model of True and False. Everything else is held fixed.
    inputs, batched, outputs, select
        As for `Problem`.
    **arguments
        Passed to the model with every example.

    Returns
    -------
    Problem
        Whose parameters are the model with None in the place of all that is held fixed.
    """
    if not callable(model):
        raise InvalidRequestError(f"model is a {kind_of(model)}; allowed is a equinox.Module that can be called")
    moving, fixed = eqx.partition(eqx.nn.inference_mode(model), wrt)

    def apply(params: Any, x: Any) -> Any:
        whole = eqx.combine(params, fixed)
        return whole(x, **arguments) if state is None else whole(x, state, **arguments)[0]

    return Problem(apply=apply, params=moving, inputs=inputs, batched=batched, outputs=outputs, select=select)

"""Problems of flax modules in one line, linen and nnx; needs the extra `flax`.

import jacstore.flax

problem = jacstore.flax.linen_problem(model, variables, x, train=False)
problem = jacstore.flax.nnx_problem(model, x)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jacstore.errors import InvalidRequestError
from jacstore.problem.problem import Problem
from jacstore.problem.user_errors import kind_of

try:
    from flax import errors, linen, nnx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"jacstore.flax needs flax ({error}): pip install 'jacstore[flax]'") from error

__all__ = ["linen_problem", "nnx_problem"]


def linen_problem(
    model: linen.Module,
    variables: Mapping[str, Any],
    inputs: Any,
    *,
    batched: bool = True,
    outputs: str | Sequence[int] = "all",
    select: str | Callable[[str], bool] | None = None,
    **arguments: Any,
) -> Problem:
    """The `Problem` of a linen module: columns for its parameters, everything else held fixed.

    Parameters
    ----------
    model
        A `flax.linen.Module`.
    variables
        What `model.init` returned, or the variables after training: the collection `params`, and others such as
        `batch_stats`, which are used as they are.
    inputs, outputs, select
        As for `Problem`; paths of leaves begin below `params`.
    batched
        As for `Problem`, but True: most modules of flax insist on a batch axis.
    **arguments
        Passed to the module with every example, such as `train=False`, `deterministic=True` or `method="encode"`.

    Returns
    -------
    Problem
        Whose parameters are `variables["params"]`.
    """
    if not isinstance(model, linen.Module):
        raise InvalidRequestError(
            f"model is a {kind_of(model)}; allowed is a flax.linen.Module; of nnx modules use jacstore.flax.nnx_problem"
        )
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise InvalidRequestError(
            "variables has no collection params; give all that model.init returned, such as "
            '{"params": …, "batch_stats": …}'
        )
    fixed = {name: values for name, values in variables.items() if name != "params"}

    def apply(params: Any, x: Any) -> Any:
        try:
            return model.apply({"params": params, **fixed}, x, **arguments)
        except (errors.ModifyScopeVariableError, errors.InvalidRngError) as error:
            raise InvalidRequestError(
                f"the module updates statistics or draws noise, as in training: {str(error).partition(' (http')[0]} "
                "pass the argument of the module that turns this off, such as train=False or deterministic=True"
            ) from error

    return Problem(
        apply=apply, params=variables["params"], inputs=inputs, batched=batched, outputs=outputs, select=select
    )


def nnx_problem(
    model: nnx.Module,
    inputs: Any,
    *,
    wrt: Any = nnx.Param,
    batched: bool = True,
    outputs: str | Sequence[int] = "all",
    select: str | Callable[[str], bool] | None = None,
    **arguments: Any,
) -> Problem:
    """The `Problem` of an nnx module in evaluation mode, whatever the mode of `model`, which stays as it is.

    Parameters
    ----------
    model
        A `flax.nnx.Module`.
    wrt
        The variables that the Jacobian has columns for, as `flax.nnx.grad` names them: a type such as `nnx.Param` or
        `nnx.LoRAParam`, or any filter of nnx. Everything else is held fixed.
    inputs, outputs, select
        As for `Problem`.
    batched
        As for `Problem`, but True: most modules of flax insist on a batch axis.
    **arguments
        Passed to the module with every example.

    Returns
    -------
    Problem
        Whose parameters are the pure dict of the variables that `wrt` names.
    """
    if not isinstance(model, nnx.Module):
        raise InvalidRequestError(
            f"model is a {kind_of(model)}; allowed is a flax.nnx.Module; of linen modules use "
            "jacstore.flax.linen_problem"
        )
    evaluated = nnx.clone(model)
    evaluated.eval()
    definition, moving, fixed = nnx.split(evaluated, wrt, ...)

    def apply(params: Any, x: Any) -> Any:
        return nnx.merge(definition, params, fixed)(x, **arguments)

    return Problem(
        apply=apply,
        params=nnx.to_pure_dict(moving),
        inputs=inputs,
        batched=batched,
        outputs=outputs,
        select=select,
    )

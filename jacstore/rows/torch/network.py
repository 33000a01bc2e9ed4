"""A module as a function of parameters and one example, its outputs flattened, and its fingerprint.

The module itself is never changed: its parameters are handed in by `torch.func.functional_call`, as detached copies or
views, so that the user's gradients, modes and types stay as they are.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from jacstore.errors import InvalidFunctionError, InvalidRequestError
from jacstore.problem.outputs import checked_outputs, count_chosen
from jacstore.problem.probes import perturbed
from jacstore.problem.pytrees import paths_and_leaves
from jacstore.problem.user_errors import kind_of, reraise_user_error

T = TypeVar("T")
# Plain attributes of a module that can decide what it computes.
PLAIN = (bool, int, float, str, tuple, type(None))


class Network:
    """A module as a function of its trainable parameters and one example.

    Attributes
    ----------
    selected
        Trainable parameters in the order of `named_parameters`, the columns of the Jacobian; paths with "/" for ".".
    left_out
        (path, reason) of every other parameter.
    dtype, device
        Those of the first selected parameter; floating inputs are converted to them.
    lowest
        The lowest precision of any call, as observed by `probe_module`.
    """

    def __init__(self, module: nn.Module, outputs: str | Sequence[int], float64: bool) -> None:
        if not isinstance(module, nn.Module):
            raise InvalidRequestError(f"module is a {kind_of(module)}; it has to be a torch.nn.Module; change module=")
        self.module, self.outputs = module, checked_outputs(outputs)
        self.selected: dict[str, torch.Tensor] = {}
        self.rest: dict[str, torch.Tensor] = {}
        self.left_out: list[tuple[str, str]] = []
        for name, parameter in module.named_parameters():
            if parameter.is_complex():
                raise InvalidRequestError(
                    f"parameter {name!r} is {parameter.dtype}; parameters have to be real; change module="
                )
            if parameter.requires_grad:
                self.selected[name] = _plain(parameter, float64)
            else:
                self.rest[name] = _plain(parameter, float64)
                self.left_out.append((path_of(name), "requires_grad is False"))
        if not sum(value.numel() for value in self.selected.values()):
            raise InvalidRequestError(
                "module has no parameter with requires_grad (P = 0); at least one is needed; change module="
            )
        self.rest |= {name: _plain(buffer, float64) for name, buffer in module.named_buffers()}
        first = next(iter(self.selected.values()))
        self.dtype, self.device = first.dtype, first.device
        self.lowest = max((value.dtype for value in self.selected.values()), key=lambda dtype: torch.finfo(dtype).eps)

    def __call__(self, selected: Mapping[str, torch.Tensor], example: Any) -> torch.Tensor:
        """The chosen outputs `(K,)` of one example without a batch axis; `selected` may hold some parameters only."""
        flat = self.batch(mapped(lambda leaf: leaf[None], example), selected)[0]
        if self.outputs == "all":
            return flat
        if self.outputs == "sum":
            return flat.sum(0, keepdim=True)
        return flat[torch.as_tensor(self.outputs, device=flat.device)]

    def batch(self, examples: Any, selected: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """All outputs `(n, K)` of a batch; a tuple or list of inputs is arguments, a dict keywords."""
        arguments = tuple(examples) if isinstance(examples, (tuple, list)) else (examples,)
        keywords = examples if isinstance(examples, dict) else None
        given = self._given(selected or {})
        output = torch.func.functional_call(self.module, given, () if keywords else arguments, keywords)
        return _flattened(output, len(leaves_of(examples)[0]))

    def _given(self, selected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**self.rest, **self.selected, **selected}

    def holding(self, selected: Mapping[str, torch.Tensor], run: Callable[[], T]) -> T:
        """The result of `run`, with these parameters in the module also between its calls.

        A backward pass may call parts of a module again (`torch.utils.checkpoint`).
        """
        given = {f"module.{name}": value for name, value in self._given(selected).items()}
        held: T = torch.func.functional_call(_Holding(self.module), given, (run,))
        return held

    def tensors(self, examples: Any) -> Any:
        """Examples from NumPy as tensors on the module's device, floating ones in its type."""

        def moved(leaf: np.ndarray) -> torch.Tensor:
            tensor = torch.from_numpy(np.array(leaf, order="C"))
            return tensor.to(self.device, self.dtype if tensor.is_floating_point() else tensor.dtype)

        return mapped(moved, examples)


class _Holding(nn.Module):
    """Run a function while `module` has the given parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[[], T]) -> T:
        return run()


def host(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as NumPy; types that NumPy lacks are widened to float32."""
    tensor = tensor.detach()
    narrow = tensor.is_floating_point() and tensor.element_size() < 4
    return (tensor.float() if narrow else tensor).cpu().numpy()


def path_of(name: str) -> str:
    """The path of a leaf from a parameter's name: "/" for "."."""
    return name.replace("%", "%25").replace("/", "%2F").replace(".", "/")


def _plain(tensor: torch.Tensor, float64: bool) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.double() if float64 and tensor.is_floating_point() else tensor


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a pytree, in the order that the whole package uses."""
    return [leaf for _, leaf in paths_and_leaves(tree)]


def mapped(function: Any, tree: Any) -> Any:
    """A pytree with a function applied to each leaf."""
    if isinstance(tree, dict):
        return {key: mapped(function, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        values = [mapped(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return function(tree)


def _flattened(output: Any, count: int) -> torch.Tensor:
    parts = []
    for path, leaf in paths_and_leaves(_as_tree(output)):
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            kind = leaf.dtype if isinstance(leaf, torch.Tensor) else kind_of(leaf)
            raise InvalidRequestError(
                f"module returned output {path!r} of type {kind}; outputs have to be floating tensors, or tuples or "
                "dicts of them; wrap the module"
            )
        if leaf.shape[:1] != (count,):
            raise InvalidRequestError(
                f"module returned output {path!r} of shape {tuple(leaf.shape)} for a batch of {count}; the first axis "
                f"has to be {count}; wrap the module"
            )
        parts.append(leaf.reshape(count, -1))
    if not sum(part.shape[1] for part in parts):
        raise InvalidRequestError("module returned no outputs (K = 0); at least one is needed; change module=")
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def _as_tree(output: Any) -> Any:
    """Mappings and dataclasses of outputs, such as those of Hugging Face, as dicts without None."""
    if dataclasses.is_dataclass(output) and not isinstance(output, (type, Mapping)):
        output = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    if isinstance(output, Mapping):
        return {key: _as_tree(value) for key, value in output.items() if value is not None}
    if isinstance(output, (tuple, list)):
        return tuple(_as_tree(value) for value in output)
    return output


# --------------------------------------------------------------------------------------------------------------- probes


@contextmanager
def settings() -> Iterator[None]:
    """Full precision, deterministic convolutions, attention that vmap can take and whose layers hooks can see."""
    fast, precision = torch.backends.mha.get_fastpath_enabled(), torch.get_float32_matmul_precision()
    torch.backends.mha.set_fastpath_enabled(False)
    torch.set_float32_matmul_precision("highest")
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
            torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.set_float32_matmul_precision(precision)


def refuse_training(module: nn.Module) -> None:
    """Refuse layers whose training mode draws noise or couples examples."""
    coupling, noisy = (nn.modules.batchnorm._BatchNorm,), (nn.modules.dropout._DropoutNd,)
    for name, layer in module.named_modules():
        if not layer.training:
            continue
        rate = getattr(layer, "p" if isinstance(layer, noisy) else "dropout", 0)
        drops = isinstance(rate, (int, float)) and rate > 0
        if isinstance(layer, coupling) or drops:
            what = "couples the examples of a batch" if isinstance(layer, coupling) else "draws noise"
            raise InvalidFunctionError(
                f"layer {name or '.'!r} ({kind_of(layer)}) is in training mode, where it {what}; call module.eval()"
            )


def probe_module(network: Network, example: Any) -> int:
    """Check outputs of example 0: finite, repeatable, of one example; returns K.

    Raises
    ------
    InvalidFunctionError
        Naming what is wrong and what to change.
    """
    refuse_training(network.module)
    alone = mapped(lambda leaf: leaf[None], example)
    with torch.no_grad(), calling(example):
        with _Lowest(network):
            once = network.batch(network.tensors(alone))[0]
        again = network.batch(network.tensors(alone))[0]
        finite = all(np.isfinite(leaf).all() for leaf in leaves_of(example) if leaf.dtype.kind == "f")
        if finite and not torch.isfinite(once).all():
            k = int(torch.isfinite(once).int().argmin())
            raise InvalidFunctionError(f"output {k} of example 0 is {once[k]}, its input is finite; change module=")
        if not close(once, again, network.lowest):
            raise InvalidFunctionError(
                "outputs change from call to call (dropout? noise?); they have to depend on parameters and example "
                "alone; call module.eval()"
            )
        pair = mapped(lambda leaf: np.stack([leaf, perturbed(leaf)]), example)
        beside = network.batch(network.tensors(pair))[0]
    if not (once.shape == beside.shape and close(once, beside, network.lowest)):
        raise InvalidFunctionError(
            "outputs depend on the other examples of the batch (BatchNorm without running statistics?); they have to "
            "depend on one example; call module.eval() or change module="
        )
    return count_chosen(len(once), network.outputs)


def calling(example: Any) -> Any:
    """Report what is raised inside as an error of the module."""
    given = ", ".join(f"{path!r}: {leaf.dtype}{list(leaf.shape)}" for path, leaf in paths_and_leaves(example))
    return reraise_user_error(
        "module raised",
        f"it gets a batch of examples such as ({given}), a tuple as arguments, a dict as keywords; change inputs=",
    )


class _Lowest(TorchFunctionMode):
    """Observe the lowest precision that any call returns."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for one in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                self.network.lowest = max(one.dtype, self.network.lowest, key=lambda dtype: torch.finfo(dtype).eps)
        return found


def close(a: torch.Tensor, b: torch.Tensor, lowest: torch.dtype) -> bool:
    """Whether `‖a - b‖ <= sqrt(eps) ‖a‖`, eps that of the lowest precision in the network.

    A batch of two may add in another order than one, an error of some eps.
    """
    tolerance = float(torch.finfo(lowest).eps) ** 0.5
    a, b = a.double(), b.double()
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
    return bool(torch.linalg.norm(a - b) <= tolerance * max(torch.linalg.norm(a), torch.linalg.norm(b)))


# ---------------------------------------------------------------------------------------------------------- fingerprint


def requested(network: Network, first: Any) -> dict[str, Any]:
    """Fields that decide the rows, JSON-able; `first` is example 0 as it was read, `(1, ...)`."""
    module = network.module
    tensors = [
        (f"{name}.{key}", value)
        for name, layer in module.named_modules()
        for key, value in sorted(vars(layer).items())
        if isinstance(value, torch.Tensor)
    ]
    return {
        "parameters": _hash(module.named_parameters()),
        "function": hashlib.sha256(_structure(module).encode()).hexdigest(),
        "constants": _hash([*module.named_buffers(), *tensors]),
        "outputs": network.outputs if isinstance(network.outputs, str) else list(network.outputs),
        "selection": [path_of(name) for name in network.selected],
        "inputs": [[path, list(leaf.shape[1:]), str(leaf.dtype)] for path, leaf in paths_and_leaves(first)],
    }


def _hash(named: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()


def _structure(module: nn.Module) -> str:
    """Layers, their classes and plain attributes; of classes outside torch their source without comments."""
    lines, sources = [], {}
    for name, layer in module.named_modules():
        kind = type(layer)
        plain = {
            key: value
            for key, value in sorted(vars(layer).items())
            if key != "training" and not key.startswith("_") and isinstance(value, PLAIN)
        }
        lines.append(f"{name}: {kind.__module__}.{kind.__qualname__} {layer.extra_repr()} {plain}")
        for base in kind.__mro__:
            if base.__module__.partition(".")[0] not in ("torch", "builtins", "typing", "abc"):
                sources[base.__qualname__] = _source(base)
    return "\n".join([*lines, *(sources[name] for name in sorted(sources))])


def _source(kind: type) -> str:
    try:
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(kind))))
    except (OSError, TypeError, SyntaxError):
        return kind.__qualname__

"""Compute predictive variances or samples of a dense network with laplace-torch, with seconds and peak memory.

A dense network, its data and a prior precision come as npz; the answer goes to npy, the measurements are JSON.
Predictive variances at `others`, or `samples` deviations from the parameters, `(n, P)` in the order of JAX's pytrees.
Runs where torch and laplace-torch are installed. The posterior is that of all parameters for a Gaussian likelihood of
variance 1, `Jᵀ J + alpha I` over parameters inverted (`full`).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import torch
from laplace import Laplace
from laplace.curvature import BackPackGGN
from serve import forget_peak, peak_bytes
from torch.utils.data import DataLoader, TensorDataset


def module(arrays: dict[str, np.ndarray]) -> torch.nn.Sequential:
    """Dense layers with ReLU between them."""
    layers: list[torch.nn.Module] = []
    for n in range(sum(name.endswith("/weight") for name in arrays)):
        weight, bias = arrays[f"dense{n}/weight"], arrays[f"dense{n}/bias"]
        layer = torch.nn.Linear(*weight.shape)
        layer.load_state_dict({"weight": torch.tensor(weight.T.copy()), "bias": torch.tensor(bias)})
        layers += [torch.nn.ReLU(), layer] if layers else [layer]
    return torch.nn.Sequential(*layers)


def variances(posterior: Any, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Covariances of the outputs at other examples, `(M, K, K)`."""
    others = torch.tensor(arrays["others"])
    return torch.cat([posterior(batch, pred_type="glm")[1].detach() for batch in others.split(100)]).numpy()


def samples(posterior: Any, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Deviations from the parameters: of every layer its bias, then its weight `(in, out)`."""
    generator = torch.Generator().manual_seed(int(arrays["key"]))
    drawn = posterior.sample(int(arrays["samples"]), generator=generator).sub_(posterior.mean)
    parts, start = [], 0
    for n in range(sum(name.endswith("/weight") for name in arrays)):
        inputs, outputs = arrays[f"dense{n}/weight"].shape
        weight, bias = drawn[:, start : start + inputs * outputs], inputs * outputs + start
        parts.append(drawn[:, bias : bias + outputs])
        parts.append(weight.reshape(-1, outputs, inputs).transpose(1, 2).reshape(len(drawn), -1))
        start = bias + outputs
    return torch.cat(parts, dim=1).numpy()


def main() -> None:
    given, out = sys.argv[1:3]
    with np.load(given) as file:
        arrays = dict(file)
    net, inputs, targets = module(arrays), torch.tensor(arrays["inputs"]), torch.tensor(arrays["targets"])
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=100)
    forget_peak()
    started = time.perf_counter()
    posterior = Laplace(
        net,
        "regression",
        subset_of_weights="all",
        hessian_structure="full",
        prior_precision=float(arrays["alpha"]),
        sigma_noise=1.0,
        backend=BackPackGGN,
    )
    posterior.fit(loader)
    fitted = time.perf_counter() - started
    np.save(out, (samples if "samples" in arrays else variances)(posterior, arrays))
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "seconds_fit": fitted, "peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()

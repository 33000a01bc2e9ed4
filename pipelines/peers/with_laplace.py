"""In: a dense network, its data and a prior precision as npz. Out: predictive variances, seconds and peak as JSON.

Runs where torch and laplace-torch are installed. The posterior is that of all parameters for a Gaussian likelihood of
variance 1, `Jᵀ J + alpha I` over parameters inverted (`full`).
"""

from __future__ import annotations

import json
import sys
import time

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


def main() -> None:
    given, variances = sys.argv[1:3]
    with np.load(given) as file:
        arrays = dict(file)
    net, inputs, others = module(arrays), torch.tensor(arrays["inputs"]), torch.tensor(arrays["others"])
    targets = torch.tensor(arrays["targets"])
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
    found = torch.cat([posterior(batch, pred_type="glm")[1].detach() for batch in others.split(100)])
    seconds = time.perf_counter() - started
    np.save(variances, found.numpy())
    print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()

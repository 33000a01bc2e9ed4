"""Names of dimensions: unique in an array, and of one size in a group, so that xarray opens every group."""

from __future__ import annotations

import pytest
import zarr

from helpers_faults import make
from jacstore import KernelFactor, gram


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("names")
    make("factored", place / "run.jac")
    kernel = gram(place / "run.jac", out=place / "run.ntk")
    KernelFactor(kernel, 1.0)
    return place


GROUPS = [("run.jac", "/"), ("run.jac", "factors"), ("run.ntk", "/"), ("run.ntk", "factors")]


@pytest.mark.parametrize(("name", "group"), GROUPS)
def test_names_are_unique_in_an_array_and_of_one_size_in_a_group(name, group, folder):
    sizes: dict[str, int] = {}
    arrays = list(zarr.open_group(folder / name, path=group, mode="r").arrays())
    assert arrays
    for _, array in arrays:
        names = array.metadata.dimension_names
        assert len(set(names)) == len(names) == array.ndim
        for one, size in zip(names, array.shape, strict=True):
            assert sizes.setdefault(one, size) == size


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "group"), GROUPS)
def test_xarray_opens_every_group(name, group, folder):
    xarray = pytest.importorskip("xarray")
    assert len(xarray.open_zarr(folder / name, group=group, consolidated=False, chunks=None).variables)

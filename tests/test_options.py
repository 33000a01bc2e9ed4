"""Options stand once: keywords, flags, defaults and help of build and gram all come from one declaration."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields, replace
from typing import get_type_hints

import click
import numpy as np
import pytest
from click.testing import CliRunner

import jacstore
import jacstore.cli.commands
import jacstore.rows.build
from helpers_errors import refusal
from jacstore import InvalidRequestError
from jacstore.base.limits import DTYPES
from jacstore.base.options import Options, count, described, flag_of, host_memory, other, pair, size, switch, word
from jacstore.cli.flags import flags_of
from jacstore.cli.terminal import common
from jacstore.kernels.gram import plan_for
from jacstore.kernels.plan.options import GramOptions
from jacstore.rows.build import plan_build
from jacstore.rows.options import BuildOptions
from jacstore.testing import mlp

COMMANDS = jacstore.cli.commands.main.commands
# What functions take beside options.
NOT_OPTIONS = {"listener", "stop", "outputs"}


def keywords(function):
    """Keyword-only parameters that are options, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    taken = [one for one in parameters if one.kind is one.KEYWORD_ONLY and one.name not in NOT_OPTIONS]
    return {one.name: one.default for one in taken}


def declared(options):
    return {one.name: one.default for one in fields(options)}


def own_names(command):
    """What a command takes by itself, and what all take; the rest are flags of its options."""
    of_all = click.command()(common(lambda shared: None)).params
    return {*inspect.signature(COMMANDS[command].callback).parameters, *(one.name for one in of_all)}


def torch_build():
    pytest.importorskip("torch")
    return jacstore.torch.build


# --- one declaration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "function"),
    [(BuildOptions, lambda: jacstore.build), (BuildOptions, torch_build), (GramOptions, lambda: jacstore.gram)],
    ids=["build", "torch.build", "gram"],
)
def test_the_keywords_of_a_function_are_its_options_in_their_order_with_their_defaults(options, function):
    assert list(keywords(function()).items()) == list(declared(options).items())


def test_builds_with_jax_and_with_torch_declare_the_same_types():
    of_jax, of_torch = (get_type_hints(function) for function in (jacstore.build, torch_build()))
    assert {name: of_jax[name] for name in declared(BuildOptions)} == {
        name: of_torch[name] for name in declared(BuildOptions)
    }


@pytest.mark.parametrize(("command", "options"), [("build", BuildOptions), ("gram", GramOptions)])
def test_the_flags_of_a_command_are_its_options_with_their_defaults_words_and_help(command, options):
    flags = {one.name: one for one in COMMANDS[command].params if one.name not in own_names(command)}
    assert list(flags) == list(declared(options))
    for name, option in described(options).items():
        flag = flags[name]
        assert flag.opts == [flag_of(name)] and flag.help == option.help
        assert (flag.default or None) == (declared(options)[name] or None)
        assert flag.is_flag == (option.type is bool)
        assert getattr(flag.type, "choices", ()) == option.words


@pytest.mark.parametrize("function", [jacstore.build, jacstore.gram], ids=["build", "gram"])
def test_every_keyword_is_explained(function):
    names = inspect.getdoc(function).split("Parameters\n----------\n")[1].split("\n\n")[0]
    said = {name for line in names.splitlines() if not line.startswith(" ") for name in line.split(", ")}
    assert set(keywords(function)) - said <= {"overwrite"}


@dataclass(frozen=True, kw_only=True)
class Example(Options):
    """One option of each kind."""

    memory: int = host_memory("Memory.")
    limit: int | None = size("Limit.")
    steps: int | None = count("Steps.")
    tries: int = count("Tries.", default=2)
    buffer: int = size("Buffer.", default="1kB")
    dtype: str = word("float32", DTYPES, "Type.")
    maybe: str | None = word(None, ("a", "b"), "Maybe.")
    rows: tuple[int, int] | None = pair("A:B", "Rows.")
    fast: bool = switch("Fast.")
    place: str = other("here", lambda given, flag: str(given).upper(), "Place.")


def test_a_new_flag_is_one_field():
    taken = {}

    @click.command()
    @flags_of(Example)
    def command(**given):
        taken.update(given)

    words = ["--limit", "2kB", "--steps", "3", "--maybe", "b", "--rows", "1:4", "--fast", "--place", "there"]
    assert CliRunner().invoke(command, words).exit_code == 0
    found = Example.among(taken | {"unrelated": 1})
    assert (found.limit, found.steps, found.dtype, found.maybe, found.rows) == (2000, 3, "float32", "b", (1, 4))
    assert found.fast is True and found.place == "THERE" and found.memory > 0
    assert (found.tries, found.buffer) == (2, 1000)
    shown = CliRunner().invoke(command, ["--help"]).output
    assert "[default: 2]" in shown and "[default: 1kB]" in shown
    assert all(f"--{name}" in shown for name in declared(Example)) and "[float32|bfloat16|float16|float64]" in shown


def test_an_option_with_a_default_cannot_be_left_open():
    for name, wrong in (("tries", None), ("tries", 0), ("buffer", None), ("buffer", "none")):
        text = refusal(Example, **{name: wrong})
        assert text.startswith(f"--{name} {wrong}: ") and f"({name}=)" in text


# --- checked in one place ---------------------------------------------------------------------------------------------


def test_options_are_checked_when_they_are_made_and_stay_as_they_are_when_one_is_replaced():
    options = BuildOptions(memory="2GB", part="2/3", examples="1:5", device_memory="1MB", allow_nonfinite=np.True_)
    assert (options.memory, options.part, options.examples) == (2_000_000_000, (2, 3), (1, 5))
    assert options.allow_nonfinite is True
    again = replace(options, unit_size=np.int64(4))
    assert again.unit_size == 4 and replace(again, unit_size=None) == options
    assert BuildOptions(dtype=np.dtype("float64")).dtype == "float64" and BuildOptions().part == (1, 1)


@pytest.mark.parametrize("options", [BuildOptions, GramOptions])
def test_every_option_refuses_what_it_does_not_allow_in_one_line_with_flag_and_keyword(options):
    for name in described(options):
        wrong = {"memory": "lots", "device_memory": 0, "scheduler": "dask"}.get(name, "no such")
        text = refusal(options, **{name: wrong})
        assert flag_of(name) in text and f"{name}=" in text and str(wrong) in text


@pytest.mark.parametrize("function", [jacstore.build, plan_build], ids=["build", "its plan"])
def test_a_build_and_its_plan_refuse_alike(function):
    for name in described(BuildOptions):
        assert flag_of(name) in refusal(function, mlp(3), None, **{name: "no such"})


def test_a_gram_and_its_plan_refuse_combinations_alike():
    store = jacstore.build(mlp(3), None)
    for given in ({"workers": 2}, {"triangle": True, "mode": "blocks"}, {"engine": "blas", "precision": "fast"}):
        assert refusal(jacstore.gram, store, **given) == refusal(plan_for, store, **given)


def test_a_text_is_no_switch():
    with pytest.raises(InvalidRequestError, match="overwrite='false'; allowed are True and False"):
        jacstore.build(mlp(3), None, overwrite="false")


def test_a_plan_takes_every_option_of_its_build():
    plan = plan_build(mlp(6), None, allow_nonfinite=True, overwrite=True, examples="1:5", part="1/2")
    assert plan.examples == 4


def test_devices_are_refused_for_modules_which_compute_where_their_parameters_are():
    torch = pytest.importorskip("torch")
    text = refusal(torch_build(), torch.nn.Linear(2, 2).eval(), np.zeros((3, 2), np.float32), None, devices="0,1")
    assert text.startswith("--devices:") and "leave it out (devices=)" in text


@pytest.mark.parametrize("wrong", ["some", "1,x", 1.5, True, "1-2"])
def test_devices_that_are_no_numbers_are_refused_when_the_options_are_made(wrong):
    for options in (BuildOptions, GramOptions):
        assert "allowed are all, a count" in refusal(options, devices=wrong)

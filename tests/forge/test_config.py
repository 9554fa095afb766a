from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import leaves, parse, to_yaml
from forge.errors import ConfigError


@dataclass
class Function:
    """One reward function."""

    path: str = "pkg:name"
    """Where it is, `module:name`."""
    weight: float = 1.0
    """Factor in the sum."""


@dataclass
class Rewards:
    """What an episode is worth."""

    functions: list[Function] = field(default_factory=lambda: [Function()])
    """Summed by weight."""
    timeout_s: float = 10.0
    """Seconds until a sample is given up."""


@dataclass
class Role:
    """Processes of one role."""

    procs: int | None = None
    """Ranks of one replica."""
    pool: str = "default"
    """Name of the device pool."""


@dataclass
class Mesh:
    """Where each role runs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device."""
    debug: bool = False
    """Everything in one process."""
    pools: dict[str, int] = field(default_factory=dict)
    """Device slots by pool."""
    trainer: Role = field(default_factory=Role)
    """The optimizer's ranks."""
    generator: Role = field(default_factory=lambda: Role(procs=2))
    """The engines' ranks."""


@dataclass
class App:
    """A small app."""

    model: str | None = None
    """Folder or name."""
    seed: int = 0
    """Of everything random."""
    ratios: list[float] = field(default_factory=list)
    """Some numbers."""
    spare: Role | None = None
    """May be missing."""
    mesh: Mesh = field(default_factory=Mesh)
    """Placement of roles."""
    rewards: Rewards = field(default_factory=Rewards)
    """The reward."""


Run = Callable[..., App]


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text("seed: 3\nmesh:\n  pools: {a: 1}\n  trainer:\n    procs: 4\nrewards:\n")
    return path


@pytest.fixture
def run(preset: Path) -> Run:
    def _run(*argv: str, **options: Any) -> App:
        return parse(App, argv, default_config=preset, prog="app", description="Tries things.", **options)

    return _run


@pytest.fixture
def fails(run: Run, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def _fails(*argv: str, **options: Any) -> str:
        with pytest.raises(SystemExit) as exit_info:
            run(*argv, **options)
        out, err = capsys.readouterr()
        assert exit_info.value.code == 2
        assert out == ""
        assert err.startswith("app: error: ")
        assert err.count("\n") == 1, "one line, no usage"
        return err.removeprefix("app: error: ")

    return _fails


def test_the_preset_overlays_the_code_and_leaves_the_rest_at_its_default(run: Run) -> None:
    config = run()
    assert config == App(seed=3, mesh=Mesh(pools={"a": 1}, trainer=Role(procs=4)))
    assert isinstance(config.mesh.generator, Role)
    assert config.mesh.generator.procs == 2


def test_options_overlay_the_preset_in_both_spellings(run: Run) -> None:
    together = run("--seed=7", "--mesh.trainer.procs=1", "--mesh.device=cpu", "--rewards.timeout_s=1e-5")
    apart = run("--seed", "7", "--mesh.trainer.procs", "1", "--mesh.device", "cpu", "--rewards.timeout_s", "1e-5")
    assert together == apart
    assert (together.seed, together.mesh.trainer.procs, together.mesh.device) == (7, 1, "cpu")
    assert together.rewards.timeout_s == 1e-5
    assert run("--seed", "-1").seed == -1
    assert run("--seed=1", "--seed=2").seed == 2


@pytest.mark.parametrize(
    ("argv", "debug"),
    [
        (["--mesh.debug"], True),
        (["--mesh.debug=true"], True),
        (["--mesh.debug", "true"], True),
        (["--mesh.debug", "--seed=1"], True),
        (["--mesh.debug=false"], False),
        (["--mesh.debug", "false"], False),
    ],
)
def test_a_boolean_is_a_flag_and_a_value(run: Run, argv: list[str], debug: bool) -> None:
    assert run(*argv).mesh.debug is debug


def test_mappings_are_replaced_whole_or_extended_by_key(run: Run) -> None:
    assert run("--mesh.pools={b: 2}").mesh.pools == {"b": 2}
    assert run("--mesh.pools.b=2").mesh.pools == {"a": 1, "b": 2}


def test_lists_of_dataclasses_come_from_file_and_command_line(run: Run, tmp_path: Path) -> None:
    variant = tmp_path / "variant.yaml"
    variant.write_text("rewards:\n  functions:\n  - path: m:f\n  - {path: m:g, weight: 2}\n")
    assert run("--config", str(variant)).rewards.functions == [Function("m:f"), Function("m:g", 2.0)]
    assert run("--rewards.functions=[{path: m:h, weight: 3}]").rewards.functions == [Function("m:h", 3.0)]
    added = run("--rewards.functions+={path: m:h}").rewards.functions
    assert added == [Function(), Function("m:h")]


def test_an_optional_section_is_made_and_changed_key_by_key(run: Run, tmp_path: Path) -> None:
    assert run("--spare.procs=3").spare == Role(procs=3)
    variant = tmp_path / "variant.yaml"
    variant.write_text("spare: {procs: 5}\n")
    assert run(f"--config={variant}", "--spare.pool=b").spare == Role(procs=5, pool="b")
    assert run(f"--config={variant}", "--spare=null").spare is None


def test_config_replaces_the_default_preset_entirely(run: Run, tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing yet\n")
    assert run(f"--config={empty}") == App()


def test_a_resumed_run_brings_its_configuration_and_the_command_line_changes_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 5\nmodel: m\n")
    for words in (["--resume", str(tmp_path)], [f"--model={tmp_path}"]):
        config = run(*words, "--seed=9", resume_key="model")
        assert (config.model, config.seed, config.mesh.trainer.procs) == (str(tmp_path), 9, None)
    assert run("--resume", str(tmp_path), resume_key="model").seed == 5
    other = tmp_path / "other.yaml"
    other.write_text("seed: 6\n")
    assert run("--resume", str(tmp_path), "--config", str(other), resume_key="model").seed == 6


def test_what_cannot_be_resumed_is_one_line(fails: Callable[..., str], tmp_path: Path) -> None:
    assert f"config file '{tmp_path}/config.yaml' cannot be read" in fails(f"--resume={tmp_path}", resume_key="model")
    assert "resume" in fails(f"--resume={tmp_path}")


def test_text_stays_text_and_null_is_none(run: Run) -> None:
    assert run("--model=2024").model == "2024"
    assert run("--model=[1]").model == "[1]"
    assert run("--model=/a b/c=d").model == "/a b/c=d"
    assert run("--model=null").model is None


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("--see=1", ["'see'", "did you mean 'seed'?", "--help"]),
        ("--timeout_s=1", ["'timeout_s'", "'rewards.timeout_s'"]),
        ("--mesh.trainer.prcs=1", ["'mesh.trainer.prcs'", "'mesh.trainer.procs'", "keys procs, pool"]),
        ("--mesh.generatr.procs=1", ["did you mean 'mesh.generator.procs'?"]),
        ("--spare.pol=a", ["unknown key 'spare.pol'"]),
        ("--mesh=cpu", ["mesh is a section", "mesh.device"]),
        ("--rewards.functions.weight=2", ["unknown key 'rewards.functions.weight'"]),
        ("--seed=x", ["seed is 'x' (command line)", "allowed: integer", "default is 0"]),
        ("--seed=1.5", ["seed is '1.5'", "allowed: integer"]),
        ("--seed=", ["seed is ''", "allowed: integer"]),
        ("--seed=null", ["seed is 'null'", "allowed: integer"]),
        ("--seed", ["seed has no value", "--seed=VALUE"]),
        ("--seed+=1", ["seed+ appends to a list"]),
        ("--mesh.debug=maybe", ["mesh.debug is 'maybe'", "allowed: true or false"]),
        ("--mesh.device=gpu", ["mesh.device is 'gpu'", "allowed: one of auto, cpu, cuda", "default is auto"]),
        ("--mesh.trainer.procs=two", ["mesh.trainer.procs is 'two'", "allowed: integer or null"]),
        ("--mesh.pools.a=x", ["mesh.pools.a is 'x'", "allowed: integer"]),
        ("--mesh.pools={a: null}", ["mesh.pools is '{a: null}'", "mapping of text to integer"]),
        ("--ratios=[1, x]", ["ratios is '[1, x]'", "list of number"]),
        (
            "--rewards.functions=[{path: a, weight: x}]",
            ["rewards.functions", "weight is 'x'", "allowed: number"],
        ),
        ("--rewards.functions=[{pth: a}]", ["rewards.functions", "list of {path, weight}"]),
        ("seed=1", ["unexpected argument 'seed=1'", "--key=value"]),
        ("-s", ["unexpected argument '-s'"]),
        ("--config=none.yaml", ["'none.yaml' cannot be read", "base.yaml"]),
    ],
)
def test_a_wrong_option_is_one_line_with_key_value_and_remedy(
    fails: Callable[..., str], argument: str, parts: list[str]
) -> None:
    text = fails(argument)
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("sed: 1", ["unknown key 'sed' (FILE)", "'seed'"]),
        ("mesh: {trainer: {prcs: 1}}", ["'mesh.trainer.prcs' (FILE)", "'mesh.trainer.procs'"]),
        ("rewards: {functions: [{path: a}, {pth: b}]}", ["unknown key 'rewards.functions[1].pth'"]),
        ("mesh.debug: true", ["dotted key 'mesh.debug'", "indent"]),
        ("seed: many", ["seed is 'many' (FILE)", "allowed: integer"]),
        ("seed: true", ["seed is True (FILE)"]),
        ("seed: null", ["seed is null (FILE)", "allowed: integer"]),
        ("mesh: {trainer: {pool: null}}", ["mesh.trainer.pool is null (FILE)", "allowed: text"]),
        ("mesh: cpu", ["mesh is 'cpu' (FILE)", "{device, debug, pools, trainer, generator}"]),
        ("mesh: {trainer: 3}", ["mesh.trainer is 3 (FILE)"]),
        ("seed: 1\nmodel: a\nseed: 2", ["'seed' stands twice", "line 3"]),
        ("mesh: {debug: true, debug: false}", ["'debug' stands twice"]),
        ("seed: [1", ["is not YAML"]),
        ("- seed", ["allowed: a mapping"]),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_file(
    fails: Callable[..., str], tmp_path: Path, text: str, parts: list[str]
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    message = fails(f"--config={path}")
    for part in parts:
        assert part.replace("FILE", str(path)) in message


def test_two_presets_are_refused(fails: Callable[..., str], preset: Path) -> None:
    assert "--config is given twice" in fails(f"--config={preset}", f"--config={preset}")


def test_what_validate_refuses_ends_as_one_line_too(fails: Callable[..., str], run: Run) -> None:
    def no_three(config: App) -> None:
        if config.seed == 3:
            raise ConfigError("seed is 3, allowed: anything else;\n  use --seed=4")

    assert fails(validate=no_three) == "seed is 3, allowed: anything else; use --seed=4\n"
    assert run("--seed=4", validate=no_three).seed == 4


def test_help_documents_every_leaf_with_type_value_and_docstring(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run("--help")
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    documented = list(leaves(App))
    assert len(documented) == 13
    for leaf in documented:
        assert f"--{leaf.key}=" in text
        assert leaf.doc
        assert leaf.doc in text
    for part in (
        "Tries things.",
        "--seed=3  (integer)",  # the preset's value, not the code's
        "--mesh.device=auto  (one of auto, cpu, cuda)",
        "mesh.generator: The engines' ranks.",
        "weight (number): Factor in the sum.",
        "--config=FILE.yaml",
        "--print-config",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 110


def test_print_config_is_read_back_equal(run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["--mesh.debug", "--model=x", "--rewards.functions=[{path: m:h, weight: 3}]", "--spare.procs=2"]

    def never(config: App) -> None:
        raise AssertionError("validate must not run")

    with pytest.raises(SystemExit) as exit_info:
        run(*argv, "--print-config", validate=never)
    assert exit_info.value.code == 0
    saved = tmp_path / "saved.yaml"
    saved.write_text(capsys.readouterr().out)
    assert run(f"--config={saved}") == run(*argv)


@settings(max_examples=25)
@given(
    config=st.builds(
        App,
        model=st.none() | st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"])),
        seed=st.integers(-(2**63), 2**63),
        ratios=st.lists(st.floats(allow_nan=False, allow_infinity=False)),
        spare=st.none() | st.builds(Role, procs=st.none() | st.integers()),
        mesh=st.builds(Mesh, debug=st.booleans(), pools=st.dictionaries(st.sampled_from("abc"), st.integers())),
    )
)
def test_yaml_of_any_configuration_is_read_back_equal(tmp_path_factory: pytest.TempPathFactory, config: App) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert parse(App, [], default_config=path, prog="app", description="") == config
    assert yaml.safe_load(to_yaml(config))["seed"] == config.seed

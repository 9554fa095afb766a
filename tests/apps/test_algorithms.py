"""Laws of apps/grpo/algorithms.py and of what the configuration refuses about losses. Starts no process."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from apps.grpo.algorithms import ALGORITHMS, expand
from apps.grpo.config import DEFAULT_PRESET, AppConfig, plan_run
from forge import config
from forge.errors import ConfigError

README = Path(__file__).parents[2] / "README.md"


def parse(*words: str) -> AppConfig:
    return config.parse(AppConfig, expand(words), default_config=DEFAULT_PRESET, prog="test", description="")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_a_valid_configuration(name: str) -> None:
    parse(f"--algorithm={name}", "--loss.norm_length=16").validate()


def test_the_readme_has_the_options_of_every_algorithm() -> None:
    rows = [set(row.replace("`", " ").replace(",", " ").split()) for row in README.read_text().splitlines()]
    for name in ALGORITHMS:
        assert any({f"--{option}" for option in ALGORITHMS[name]} <= row for row in rows), name


def test_dr_grpo_asks_for_the_length_that_it_divides_by() -> None:
    with pytest.raises(ConfigError, match=r"loss\.norm_length must be >= 1 .*got None; generator\.max_new_tokens"):
        parse("--algorithm=dr_grpo").validate()


def test_an_algorithm_is_its_options_written_out_and_any_given_option_wins() -> None:
    written = parse(*(f"--{option}" for option in ALGORITHMS["gspo"]))
    assert parse("--algorithm", "gspo") == written
    assert written.loss.name == "gspo"
    assert parse("--loss.clip_low=0.1", "--algorithm=gspo").loss == dataclasses.replace(written.loss, clip_low=0.1)
    assert expand(["--trainer.steps=3"]) == ["--trainer.steps=3"]


@pytest.mark.parametrize(
    "words, text",
    [
        (["--algorithm=ppo2"], "algorithm is 'ppo2' .*allowed: grpo, dr_grpo, dapo"),
        (["--algorithm"], "algorithm is ''"),
        (["--algorithm", "--trainer.steps=3"], "algorithm is ''"),
        (["--algorithm=grpo", "--algorithm=dapo"], "algorithm is given 2 times"),
    ],
)
def test_a_name_that_is_none_is_refused(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        expand(words)


@pytest.mark.parametrize(
    "words, text",
    [
        (["--loss.name=reinforce"], r"replay\.max_staleness is 1, loss\.name reinforce, which ignores"),
        (["--trainer.updates=9"], r"trainer\.updates is 9, a batch has 8 groups"),
        (["--grpo.group_size=1", "--grpo.batch_size=8"], r"grpo\.group_size must be >= 2, got 1; .*advantage is none"),
        (["--loss.kl_weight=0.1", "--loss.kl_in=reward"], r"loss\.kl_in is reward, .*use kl_in loss or"),
        (["--critic.value_clip=0"], r"critic\.value_clip must be > 0, got 0"),
        (["--critic.model=/no/folder"], r"critic\.model: model folder /no/folder does not exist"),
        (["--reward.model=/no/folder"], r"reward\.model: model folder /no/folder does not exist"),
        (["--reward.model_turns"], r"reward\.model_turns is true, reward\.model empty"),
        (["--reward.model_turns", "--reward.model=nano"], r"model_turns is true, loss\.token_advantages episode"),
        (["--grpo.advantage=gae"], r"grpo\.advantage is 'gae', .*use one of dr_grpo, grpo, none, rloo"),
    ],
)
def test_the_configuration_refuses_what_cannot_be_trained(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse(*words).validate()


def test_the_critic_has_a_role_where_it_has_a_mesh_of_its_own_and_as_many_ranks_as_the_trainer() -> None:
    slots = ["--mesh.device=cpu", "--mesh.slots=4", "--mesh.trainer.procs=2"]
    assert "critic" not in plan_run(parse("--algorithm=ppo", *slots), None).roles
    assert "critic" not in plan_run(parse("--mesh.critic.procs=2", *slots), None).roles
    apart = plan_run(parse("--algorithm=ppo", "--mesh.critic.procs=2", *slots), None)
    assert len(apart.replica("critic", 0).envs) == 2
    with pytest.raises(ConfigError, match=r"mesh\.critic\.procs is 3, the trainer has 2 ranks"):
        plan_run(parse("--algorithm=ppo", "--mesh.critic.procs=3", *slots), None)


@pytest.mark.parametrize("word", ["--replay.max_staleness=0", "--loss.allow_off_policy"])
def test_a_loss_that_ignores_who_sampled_runs_on_policy_or_by_an_explicit_switch(word: str) -> None:
    parse("--loss.name=reinforce", word).validate()

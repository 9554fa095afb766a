"""The app as a user runs it: real actors, a real engine, the 0.1 M model. What it says, writes and leaves behind."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from app_run import APP, NANO, RERUN, ROOT, AppRun, check_recording
from small_models import family

from apps.grpo.config import DEFAULT_PRESET, AppConfig, plan_run
from apps.grpo.models import resolve_model
from apps.grpo.spawn import model_spec
from forge import config
from forge.checkpoints import Checkpoints
from forge.errors import ConfigError
from forge.metrics import METRIC_KEYS
from forge.placement import plan_placement
from replay.recording import Recording

Launch = Callable[..., AppRun]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    runs: list[AppRun] = []

    def start(*options: str, **settings: Any) -> AppRun:
        runs.append(AppRun(tmp_path / f"run{len(runs)}", *options, **settings))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


def check_rows(run: AppRun, steps: int, bound: int) -> None:
    rows = run.rows()
    assert [row["step"] for row in rows] == [row["policy_version"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert set(METRIC_KEYS) <= set(row)
        assert row["staleness/max"] <= row["staleness/bound"] == bound
        assert row["episodes/trained"] == 64
        assert row["tokens/trained"] > 0
        assert row["grad_norm"] > 0
        if row["staleness/max"] == 0:
            assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-4)


def test_torchrun_shards_the_trainer_and_leaves_a_folder_that_other_programs_read(launch: Launch) -> None:
    ppo = ("--algorithm=ppo", "--trainer.updates=1")  # its critic in the trainer's processes
    run = launch("--trainer.steps=3", "--replay.max_staleness=0", *ppo, launcher=TORCHRUN)
    assert run.finish() == 0, run.output
    check_rows(run, 3, bound=0)
    assert "3 of 3" in run.output
    assert "Traceback" not in run.output
    episodes = [json.loads(line) for line in (run.folder / "episodes.jsonl").read_text().splitlines()]
    assert {"step", "prompt", "completion", "reward", "versions"} <= set(episodes[0])
    assert list(run.folder.glob("events.out.tfevents*"))
    assert "max_staleness: 0" in (run.folder / "config.yaml").read_text()
    check_checkpoint(run)
    check_critic(run)


def check_checkpoint(run: AppRun) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run.folder / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "checkpoint")
    ids = tokenizer("rev:1234=", return_tensors="pt").input_ids
    assert model(ids).logits.isfinite().all()
    start = AutoModelForCausalLM.from_pretrained(resolve_model("nano"))
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))


def check_critic(run: AppRun) -> None:
    from transformers import AutoModelForSequenceClassification

    assert all(row["extra/value_loss"] > 0 and row["extra/critic_grad_norm"] > 0 for row in run.rows())
    model = AutoModelForSequenceClassification.from_pretrained(run.folder / "critic")
    assert model.score.weight.shape[0] == 1
    assert model.score.weight.any()


@pytest.mark.soak
def test_an_actor_that_is_killed_ends_the_run_with_its_name(launch: Launch) -> None:
    run = launch("--trainer.steps=1000", "--mesh.generator.on_failure=end")
    run.wait_until(run.rows, "the first step")
    run.kill_actor("generator_0")
    assert run.finish(30) == 1, run.output
    assert run.output.count("ActorFailed: actor generator_0 failed: its process was killed by SIGKILL") == 1, run.output


@pytest.mark.soak
def test_ctrl_c_ends_the_run_with_a_checkpoint_that_loads(launch: Launch) -> None:
    run = launch("--trainer.steps=1000", "--generator.temperature=0.6", "--generator.top_p=0.9")
    run.wait_until(lambda: len(run.rows()) >= 2, "two steps")
    run.press_ctrl_c()
    assert run.finish(40) == 130, run.output
    check_rows(run, len(run.rows()), bound=1)
    assert "stopping after this step" in run.output
    assert "Traceback" not in run.output
    assert f"{len(run.rows())} of 1,000" in run.output
    check_checkpoint(run)


def test_a_run_whose_controller_is_killed_goes_on_and_its_batches_give_the_same_losses_again(launch: Launch) -> None:
    ppo = ["--algorithm=ppo", "--trainer.updates=1", "--mesh.critic.procs=1"]  # its critic on a mesh of its own
    options = ["--run.checkpoint_every=2", "--replay.record", "--generator.top_p=0.9", "--generator.keep_support=8"]
    first = launch("--trainer.steps=1000", *options, *ppo)
    first.wait_until(lambda: (first.folder / "checkpoints" / "000002").exists(), "a checkpoint")
    rows = len(first.rows())
    first.wait_until(lambda: len(first.rows()) > rows, "a step behind it")
    first.kill_controller()
    assert first.finish(30) == -signal.SIGKILL

    steps = len(first.rows()) + 4
    resumed = launch(f"--trainer.steps={steps}", resumed=first)
    assert resumed.finish() == 0, resumed.output
    assert "going on behind step" in resumed.output
    assert "complete groups, of which" in resumed.output
    check_rows(resumed, steps, bound=1)
    times = [row["time_s"] for row in resumed.rows()]
    assert times == sorted(times)
    check_checkpoint(resumed)
    check_critic(resumed)

    again = launch(resumed=first, app=RERUN)
    assert again.finish() == 0, again.output
    assert f"{steps} of {steps} steps gave the recorded numbers, bit for bit" in again.output


@pytest.mark.soak
def test_a_run_that_is_killed_at_random_moments_trains_each_prompt_once(launch: Launch) -> None:
    rng = random.Random(0)
    run = launch("--trainer.steps=100000", "--run.checkpoint_every=3", "--replay.record")
    first, seen = run, 0
    for _ in range(6):
        wanted = seen + rng.randrange(1, 9)
        run.wait_until(lambda run=run, wanted=wanted: len(run.rows()) > wanted, f"step {wanted}", 300)
        time.sleep(rng.random())
        run.kill_controller()
        assert run.finish(30) == -signal.SIGKILL
        newest = Checkpoints(first.folder / "checkpoints").latest()
        seen = newest.version if newest else 0
        run = launch(resumed=first)
    steps = seen + 12
    run.wait_until(lambda: len(run.rows()) >= steps - 4, "the last steps", 300)
    run.press_ctrl_c()
    assert run.finish(60) == 130, run.output
    steps = len(run.rows())
    check_rows(run, steps, bound=1)
    check_recording(run, launch(resumed=first, app=RERUN))


@pytest.mark.soak
@pytest.mark.parametrize("packing", [False, True])
def test_a_mixture_of_experts_trains_under_recorded_routes_and_its_recording_trains_again(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: bool
) -> None:
    (tmp_path / "variety.py").write_text("def letters(sample): return len(set(sample.completion)) / 16\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # what was never trained earns nothing by the task's own reward
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "moe_intermediate_size": 32}
    sizes |= {"num_experts": 16, "num_experts_per_tok": 2}
    model = family("qwen3_moe", tmp_path / "model", **sizes, vocab_size=128, max_position_embeddings=512)
    options = [f"--trainer.packing={str(packing).lower()}", "--generator.keep_routes", "--replay.record"]
    options.append("--reward.functions=[{path: variety:letters}]")
    run = launch("--trainer.steps=4", f"--model={model}", *options)
    assert run.finish() == 0, run.output
    check_rows(run, 4, bound=1)
    assert run.rows()[0]["extra/engine_mismatch"] < 1e-4
    batches = Recording(run.folder / "journal")
    groups = [group for version in batches.versions for group in batches.batch(version).groups]
    assert all("routed_experts" in group for group in groups)
    again = launch(resumed=run, app=RERUN)
    assert again.finish() == 0, again.output
    assert "4 of 4 steps gave the recorded numbers, bit for bit" in again.output


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--generator.keep_routes --trainer.compile", "generator.keep_routes and trainer.compile are both true"),
        (
            "--mesh.trainer.on_failure=respawn --replay.journal=false",
            "mesh.trainer.on_failure is respawn, replay.journal false",
        ),
        ("--trainer.stepz=3", "trainer.stepz"),
        ("--trainer.lr=fast", "trainer.lr"),
        ("--grpo.group_size=1", "grpo.group_size must be >= 2, got 1"),
        ("--grpo.batch_size=63", "grpo.batch_size must be a positive multiple of grpo.group_size 8, got 63; use 64"),
        ("--replay.max_staleness=-1", "replay.max_staleness must be >= 0, got -1"),
        ("--model=/no/such/folder", "/no/such/folder does not exist"),
        ("--mesh.trainer.procs=64", "trainer needs 64 device(s)"),
        ("--generator.temperature=0", "generator.temperature must be >= 0.01, got 0"),
        ("--generator.keep_support=8", "generator.keep_support is 8 with top_p 1 and top_k 0: no support"),
        ("--config=missing.yaml", "missing.yaml"),
    ],
)
def test_what_cannot_work_is_one_clear_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        config.parse(
            AppConfig,
            [*NANO, *option.split()],
            default_config=DEFAULT_PRESET,
            prog="apps/grpo/main.py",
            description="",
            validate=lambda cfg: plan_run(cfg, None),
        )
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert message in said
    assert len(said.strip().splitlines()) == 1, said


ROLES = ("trainer", "generator", "evaluator", "replay", "reward", "reference", "reward_model", "environment")


@pytest.mark.parametrize(
    ("options", "ending"),
    [
        ("", set()),
        ("--mesh.reward.on_failure=end", {"reward"}),
        ("--replay.journal=false", {"trainer", "replay"}),
        ("--run.checkpoint_every=0", {"trainer"}),
        ("--run.checkpoint_every=0 --mesh.trainer.on_failure=respawn", set()),
        ("--mesh.colocate", {"trainer", "generator"}),
        ("--mesh.debug", set(ROLES)),
    ],
)
def test_who_dies_is_respawned_where_the_other_options_let_it(options: str, ending: set[str]) -> None:
    cfg = config.parse(AppConfig, [*NANO, *options.split()], default_config=DEFAULT_PRESET, prog="", description="")
    policies = {role: cfg.failure_policy(role).on_failure for role in ROLES}
    assert {role for role, policy in policies.items() if policy == "end"} == ending
    assert set(policies.values()) <= {"end", "respawn"}


def test_a_dense_model_has_no_routes_to_keep(tmp_path: Path) -> None:
    cfg = config.parse(
        AppConfig, [*NANO, "--generator.keep_routes"], default_config=DEFAULT_PRESET, prog="", description=""
    )
    with pytest.raises(ConfigError, match="keep_routes is true, but a qwen3 model is no mixture of experts"):
        model_spec(cfg, str(resolve_model("nano")), "cpu")
    assert model_spec(cfg, family("qwen3_moe", tmp_path), "cpu").keep_routes


def test_a_wrong_option_ends_the_app_before_it_makes_or_starts_anything(tmp_path: Path) -> None:
    command = [*TORCHRUN, str(APP), *NANO, f"--run.dir={tmp_path / 'run'}", "--trainer.stepz=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.count("trainer.stepz") == 1, done.stderr
    assert done.returncode != 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("preset", ["smollm2", "tiny", "qwen3_1_7b"])
def test_presets_parse_and_name_only_what_differs_from_the_defaults(preset: str) -> None:
    path = APP.with_name(f"{preset}.yaml")
    cfg = config.parse(AppConfig, [], default_config=path, prog="", description="")
    cfg.validate()
    if preset == "qwen3_1_7b":
        placed = plan_placement(cfg.mesh, device="cuda", slots=8, torchrun_slots=8, roles=["trainer", "generator"])
        devices = [d for role in placed.roles.values() for r in role.replicas for d in r.devices]
        assert sorted(devices) == list(range(8))


@pytest.mark.soak
def test_debug_mode_runs_every_actor_in_one_process(launch: Launch) -> None:
    run = launch("--trainer.steps=3", "--mesh.debug")
    assert run.finish() == 0, run.output
    check_rows(run, 3, bound=1)


@pytest.mark.soak
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("bound", [0, 3])
def test_runs_of_few_steps_end_at_any_bound(launch: Launch, steps: int, bound: int) -> None:
    run = launch(f"--trainer.steps={steps}", f"--replay.max_staleness={bound}")
    assert run.finish() == 0, run.output
    check_rows(run, steps, bound)


@pytest.mark.soak
def test_a_reward_that_raises_ends_the_run_with_the_users_traceback_once(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards.py").write_text("def fails(sample):\n    return 1 / sample.num_tokens.nothing\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = launch("--trainer.steps=100", "--reward.functions=[{path: 'my_rewards:fails'}]")
    assert run.finish() == 1, run.output
    assert "RewardError: my_rewards:fails raised AttributeError: 'int' object has no attribute 'nothing'" in run.output
    assert run.output.count("Traceback (most recent call last)") == 1, run.output
    assert 'my_rewards.py", line 2, in fails' in run.output


@pytest.mark.soak
@pytest.mark.parametrize(
    ("size", "told"),
    [("64k", "metrics.jsonl|events|episodes|journal"), ("300k", "checkpoints/"), ("300k", "checkpoint/")],
)
def test_a_full_disk_ends_the_run_with_the_path_and_the_remedy(
    launch: Launch, tmp_path: Path, size: str, told: str
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    prefix = ("unshare", "--map-root-user", "--mount", "sh", "-ec")
    if subprocess.run([*prefix, f"mount -t tmpfs -o size={size} tmpfs {disk}"], capture_output=True).returncode:
        pytest.skip("no right to mount a tmpfs in a namespace of our own")
    script = f'mount -t tmpfs -o size={size} tmpfs {disk}; exec "$0" "$@"'
    options = ["--trainer.steps=300" if size == "64k" else "--trainer.steps=2"]
    if told == "checkpoint/":
        options.append("--run.checkpoint_every=0")
    run = launch(f"--run.dir={disk / 'run'}", *options, prefix=(*prefix, script))
    assert run.finish(300) == 1, run.output
    assert len(re.findall("RunFolderError: cannot write", run.output)) == 1, run.output
    assert re.search(rf"cannot write \S*({told.rstrip('/')})\S*: No space left on device", run.output), run.output
    assert "Traceback" not in run.output


@pytest.mark.soak
def test_the_checkpoint_is_a_model_that_the_engine_and_the_trainer_load(launch: Launch) -> None:
    first = launch("--trainer.steps=2", "--trainer.lr=1e-3")
    assert first.finish() == 0, first.output
    second = launch("--trainer.steps=2", f"--model={first.folder / 'checkpoint'}")
    assert second.finish() == 0, second.output
    check_rows(second, 2, bound=1)


@pytest.mark.soak
def test_ctrl_c_while_the_actors_start_ends_at_once(launch: Launch) -> None:
    run = launch("--trainer.steps=100")
    run.wait_until(lambda: "starting the actors" in run.output, "the start of the actors")
    run.press_ctrl_c()
    assert run.finish(30) == 130, run.output
    assert "stopping now" in run.output


@pytest.mark.soak
def test_ctrl_c_twice_ends_without_waiting_for_the_step(launch: Launch) -> None:
    run = launch("--trainer.steps=1000")
    run.wait_until(lambda: len(run.rows()) >= 2, "two steps")
    run.press_ctrl_c()
    run.wait_until(lambda: "press Ctrl-C again" in run.output, "the first answer")
    time.sleep(0.4)  # a terminal and torchrun may both deliver one press; two so close count as one
    run.press_ctrl_c()
    assert run.finish(30) == 130, run.output


@pytest.mark.soak
@pytest.mark.parametrize("name", ["trainer_0", "replay", "reward"])
def test_any_actor_that_is_killed_ends_the_run_with_its_name(launch: Launch, name: str) -> None:
    run = launch("--trainer.steps=1000", f"--mesh.{name.removesuffix('_0')}.on_failure=end")
    run.wait_until(run.rows, "the first step")
    run.kill_actor(name)
    assert run.finish(30) == 1, run.output
    assert f"actor {name} failed: its process was killed by SIGKILL" in run.output, run.output


@pytest.mark.soak
def test_a_stopped_generator_halts_training_at_the_bound_which_says_so_and_ends_by_name(
    launch: Launch,
) -> None:
    run = launch("--trainer.steps=100000", "--replay.max_staleness=2", "--mesh.generator.on_failure=end")
    run.wait_until(lambda: len(run.rows()) >= 3, "three steps")
    run.signal_actor("generator_0", signal.SIGSTOP)
    run.wait_until(lambda: "waiting for a batch" in run.output, "a word about the wait")
    halted = len(run.rows())
    assert "slots are held by batches whose weights are not released yet" in run.output
    assert f"the trainer has published version {halted}, generator_0 serves" in run.output
    assert run.finish(300) == 1
    assert len(run.rows()) == halted
    assert "actor generator_0 failed" in run.output or "for generator_0 to stage version" in run.output


@pytest.mark.soak
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("transport", ["rdma", "collective", "file"])
def test_weights_go_by_every_transport(launch: Launch, transport: str, delta: bool) -> None:
    run = launch(
        "--trainer.steps=4",
        f"--weightsync.transport={transport}",
        f"--weightsync.delta={delta}",
        "--mesh.trainer.procs=2",
        "--mesh.generator.replicas=2",
        "--mesh.slots=4",
    )
    assert run.finish(400) == 0
    assert f"weights travel by {transport}, as asked" in run.output
    assert [row["policy_version"] for row in run.rows()] == [1, 2, 3, 4]


@pytest.mark.soak
def test_a_users_own_actor_joins_the_loop(launch: Launch) -> None:
    run = launch("--trainer.steps=3", app=ROOT / "apps/custom_mesh/main.py")
    assert run.finish() == 0, run.output
    check_rows(run, 3, bound=1)


@pytest.mark.soak
def test_a_kl_weight_brings_a_reference_whose_divergence_starts_at_zero(launch: Launch) -> None:
    run = launch("--trainer.steps=4", "--loss.kl_weight=0.1", "--trainer.lr=1e-3")
    assert run.finish() == 0, run.output
    kl = [row["loss/kl"] for row in run.rows()]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[-1] > 1e-4


@pytest.mark.soak
def test_memory_does_not_grow_with_the_steps(launch: Launch) -> None:
    run = launch("--trainer.steps=240", "--data.size=64")
    resident: dict[int, dict[int, int]] = {}
    for step in (80, 230):
        run.wait_until(lambda step=step: len(run.rows()) >= step, f"step {step}", 300)
        resident[step] = {process.pid: process.memory_info().rss for process in run.processes()}
    assert run.finish() == 0, run.output
    growth = {pid: rss - resident[80][pid] for pid, rss in resident[230].items() if pid in resident[80]}
    assert growth
    assert max(growth.values()) < 40 << 20, growth

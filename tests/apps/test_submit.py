"""What a cluster would be given: it parses, has what was asked for, and starts the app with its options as they are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from apps.submit import kubernetes, slurm
from apps.submit.__main__ import main
from apps.submit.config import KubernetesConfig, SlurmConfig
from forge.errors import ConfigError

AWKWARD = ["apps/grpo/main.py", "--mesh.pools={train: 8, rollout: 8}", "--data.path=it's; a $(trap) $HOME", '--x="y"']
_STUB = """#!{python}
import json, os, sys
rank = [w.split("=")[1] for w in sys.argv if w.startswith("--node-rank=")][0]
record = [sys.argv[1:], os.environ.get("HF_HOME"), os.getcwd()]
open("{folder}/seen-" + rank, "w").write(json.dumps(record))
"""


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_the_batch_script_of_the_preset_is_shell_and_has_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--partition=gpu", "--account=me", "--nodes=4", "--slots=2", "--memory=200G", "--interface=ib0"]
    script = printed(capsys, "slurm", *words, "--", *AWKWARD)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    found = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.M))
    assert {key: found[key] for key in ("partition", "account", "nodes", "gpus-per-node", "mem", "signal")} == {
        "partition": "gpu",
        "account": "me",
        "nodes": "4",
        "gpus-per-node": "2",
        "mem": "200G",
        "signal": "INT@120",
    }
    assert "export MESHFORGE_INTERFACE=ib0" in script
    assert "#SBATCH --exclusive" in script


def test_each_node_of_slurm_starts_a_torchrun_with_its_rank_and_the_app_with_its_options(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    stubs = {
        "python": _STUB.format(python=sys.executable, folder=tmp_path),
        "scontrol": "#!/bin/sh\necho first; echo second\n",
        "srun": '#!/bin/sh\nshift\nSLURM_NODEID=0 "$@"; SLURM_NODEID=1 "$@"\n',
    }
    for name, text in stubs.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    cfg = SlurmConfig(folder=str(tmp_path), setup=["export FROM_SETUP=1"], env={"HF_HOME": "a b'$(c)"}, port=2000)
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "first,second"}
    subprocess.run(["bash"], input=slurm.render(cfg, AWKWARD), text=True, check=True, env=env)
    for rank in ("0", "1"):
        words, home, folder = json.loads((tmp_path / f"seen-{rank}").read_text())
        assert words[:2] == ["-m", "torch.distributed.run"]
        assert {f"--node-rank={rank}", "--nnodes=2", "--master-addr=first", "--master-port=2000"} <= set(words)
        assert words[-len(AWKWARD) :] == AWKWARD
        assert (home, folder) == ("a b'$(c)", str(tmp_path))


def test_the_manifest_of_the_preset_is_yaml_and_has_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "kubernetes", "--name=run-a", "--nodes=3", "--namespace=me", "--env={A: b}", "--", *AWKWARD)
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert {item["metadata"]["namespace"] for item in (service, job)} == {"me"}
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (3, 3, "Indexed")
    pod: dict[str, Any] = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"], "else the first pod has no name"
    (node,) = pod["containers"]
    assert node["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert node["env"] == [{"name": "A", "value": "b"}]
    assert {mount["mountPath"] for mount in node["volumeMounts"]} == {"/dev/shm", node["workingDir"]}
    assert {mount["name"] for mount in node["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_each_pod_starts_a_torchrun_with_its_rank_and_the_app_with_its_options(tmp_path: Path) -> None:
    (tmp_path / "python").write_text(_STUB.format(python=sys.executable, folder=tmp_path))
    (tmp_path / "python").chmod(0o755)
    cfg = KubernetesConfig(name="run", folder="/work", image="i", claim="c", setup=["export HF_HOME=x"])
    _, job = yaml.safe_load_all(kubernetes.render(cfg, AWKWARD))
    (node,) = job["spec"]["template"]["spec"]["containers"]
    command = [word.replace("$$(", "$(") for word in node["command"]]  # as Kubernetes reads it
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"}
    subprocess.run(command, check=True, env=env, cwd=tmp_path)
    words, home, _ = json.loads((tmp_path / "seen-1").read_text())
    assert {"--node-rank=1", "--master-addr=run-0.run"} <= set(words)
    assert words[-len(AWKWARD) :] == AWKWARD
    assert home == "x"


@pytest.mark.parametrize(
    ("kind", "word", "said"),
    [
        ("slurm", "--nodes=0", "nodes must lie in [1, 10000], got 0"),
        ("slurm", "--time=soon", "time is 'soon'; it must be minutes, MM:SS"),
        ("slurm", "--folder=work", "folder must be an absolute path"),
        ("slurm", "--partition=a b", "partition is 'a b'; it must be one word"),
        ("slurm", "--options=[-p x]", "options has '-p x'; write each as --key=value"),
        ("slurm", "--gpus=3", "gpus is 3, slots 8"),
        ("slurm", "--image=x", "image"),
        ("kubernetes", "--image=", "image is ''"),
        ("kubernetes", "--shared_memory=lots", "shared_memory is 'lots'"),
        ("kubernetes", "--name=Run_1", "name is 'Run_1'"),
        ("kubernetes", "--env={A B: c}", "a key of env is 'A B'"),
    ],
)
def test_a_value_that_cannot_work_is_refused_before_anything_is_submitted(
    kind: str, word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main([kind, word, "--", "apps/grpo/main.py"])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["mars"], ["slurm"], ["slurm", "--", "--trainer.steps=3"]])
def test_a_command_line_without_a_cluster_or_an_app_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert "apps.submit" in capsys.readouterr().err


def test_a_line_cannot_smuggle_another_into_the_script() -> None:
    for options in ({"setup": ["a\nb"]}, {"env": {"A": "b\nc"}}, {"account": "a\n#SBATCH --x"}, {"name": "a\nb"}):
        with pytest.raises(ConfigError):
            SlurmConfig(folder="/a", **options).validate()

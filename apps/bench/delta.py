"""How little of a model an update changes, and what sending only that costs.

    python -m apps.bench.delta [--model smollm2] [--steps 3] [--on-grid] [--mb 128] [--rounds 5] [--folder DIR]

First real updates: the trainer takes steps of GRPO on completions that the model itself has sampled, with AdamW at
several learning rates. After each one the float32 masters, and what bfloat16 makes of them for the generators, are
compared bit for bit with the step before, and the latter encoded. Batches and behavior log-probs come from the model
as it is loaded and are the same for every learning rate. Masters from a bfloat16 checkpoint are moved to a random
place within their rounding interval first, where training brings them in time: straight from the checkpoint they lie
in its middle, and fewer cross over (`--on-grid` shows it). The first step of Adam moves every weight by the learning
rate; later ones move them less.

Then speed, on one thread: checksums, encoding and applying with 1 %, 10 % and 50 % of the elements changed, and the
file transport with checksums and fsync, reading what the page cache still holds. Every round runs every way once, in
turns; GB/s are those of the whole snapshot, medians over the rounds, and ratios are medians of the ratios to a memcpy
of the snapshot inside a round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from actors.model import load_hf
from actors.reference import Reference
from actors.trainer import ModelSpec, Trainer, TrainerConfig
from apps.bench.harness import rates
from apps.bench.harness.result import Column, Goal, Result, rows_table, show
from apps.grpo.models import resolve_model
from forge.batch import collate, make_group
from forge.losses import LossConfig
from forge.memory import peak_rss_bytes
from weightsync import delta
from weightsync.checksums import sums
from weightsync.layout import Layout, full_box, make_layout, view
from weightsync.offer import FULL, Offer
from weightsync.transports.context import PullerContext, SenderContext
from weightsync.transports.file import FilePuller, FileSender

LEARNING_RATES = (1e-6, 3e-6, 1e-5, 1e-4)
DTYPES = ("bfloat16", "float32")
SHARES = (0.01, 0.1, 0.5)
PROMPTS = ("The three most important things about the sea are", "def reverse(text):")
GROUP_SIZE = 4
NEW_TOKENS = 16
MEMCPY = "one memcpy"
SPARSITY_COLUMNS = (
    Column("learning rate", "lr", "g"),
    Column("step", "step"),
    Column("bf16 changed", "bfloat16_changed", ".2%"),
    Column("bf16 payload", "bfloat16_payload", ".2%"),
    Column("fp32 changed", "float32_changed", ".2%"),
)
SPEED_COLUMNS = (
    Column("", "name"),
    Column("GB/s", "gb_s", ".2f"),
    Column("ms", "median_ms", ".1f"),
    Column("x memcpy", "over_memcpy", ".2f"),
    Column("payload", "payload", ".1%"),
)


# --- real updates


def sample_batches(model: str, count: int) -> list[TensorDict]:
    """Batches of completions from the model itself, with its log-probs; more reward for more distinct tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    hf = load_hf(model, torch.float32).eval()
    reference = Reference(ModelSpec(model, "float32"), microbatch_tokens=4096)
    batches = []
    for number in range(count):
        groups = []
        for index, text in enumerate(PROMPTS):
            prompt = tokenizer(text, return_tensors="pt").input_ids
            ids = hf.generate(
                prompt.repeat(GROUP_SIZE, 1),
                attention_mask=torch.ones(GROUP_SIZE, prompt.shape[1], dtype=torch.int64),
                do_sample=True,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                pad_token_id=0,
            )
            completions = ids[:, prompt.shape[1] :].tolist()
            zeros = [[0] * NEW_TOKENS for _ in completions]
            group = make_group(prompt[0].tolist(), completions, zeros, zeros, group_id=index + number * len(PROMPTS))
            rewards = torch.tensor([len(set(c)) / len(c) for c in completions])
            group["advantages"] = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            groups.append(group)
        batch = collate(groups)
        batch["behavior_logprobs"] = reference.logprobs(batch)
        batches.append(batch)
    return batches


class Snapshots:
    """The two newest versions of a model in one dtype, as a trainer rank keeps them."""

    def __init__(self, parameters: Sequence[tuple[str, torch.Tensor]], dtype: str) -> None:
        self._parameters = parameters
        self._layout = make_layout((name, p.shape, getattr(torch, dtype)) for name, p in parameters)
        self._new, self._old = (torch.zeros(self._layout.nbytes, dtype=torch.uint8) for _ in range(2))
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Copies the parameters; what was the newest is now the one before it."""
        self._new, self._old = self._old, self._new
        for entry, (_, parameter) in zip(self._layout.entries, self._parameters, strict=True):
            view(self._new, entry).copy_(parameter)

    def changed(self) -> float:
        """The fraction of elements that differ between the two."""
        pairs = [(view(self._new, e), view(self._old, e)) for e in self._layout.entries]
        differ = sum(delta.sparsity(new, old) * new.numel() for new, old in pairs)
        return differ / sum(new.numel() for new, _ in pairs)

    def payload(self) -> float | None:
        """The size of a delta, as a fraction of the snapshot's; None when a snapshot is as small."""
        payload = torch.empty_like(self._new)
        nbytes = delta.encode(self._new, self._old, self._layout, payload, version=1, base_version=0)
        return None if nbytes is None else nbytes / self._layout.nbytes


@torch.no_grad()
def leave_grid(parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Moves float32 parameters that are bfloat16 values to random places that round to the same values."""
    for _, parameter in parameters:
        bits = parameter.view(torch.int32)
        if not bool((bits & 0xFFFF).any()):
            noise = torch.randint(-0x7FFF, 0x8000, bits.shape, dtype=torch.int32)
            bits += torch.where(bits & 0x7FFF_FFFF > 0xFFFF, noise, 0)  # not around zero, where the sign would turn


def measure_updates(model: str, steps: int, on_grid: bool) -> list[dict[str, Any]]:
    """A row for each learning rate and step."""
    batches = sample_batches(model, steps)
    rows = []
    for lr in LEARNING_RATES:
        trainer = Trainer(TrainerConfig(lr=lr), LossConfig(), ModelSpec(model, "float32"))
        parameters = list(trainer.policy.hf.named_parameters())
        if not on_grid:
            leave_grid(parameters)
        snapshots = {dtype: Snapshots(parameters, dtype) for dtype in DTYPES}
        for step, batch in enumerate(batches, 1):
            trainer.step(batch)
            row: dict[str, Any] = {"lr": lr, "step": step}
            for dtype, versions in snapshots.items():
                versions.take()
                row[f"{dtype}_changed"] = round(versions.changed(), 5)
            payload = snapshots["bfloat16"].payload()
            row["bfloat16_payload"] = None if payload is None else round(payload, 5)
            rows.append(row)
    return rows


# --- speed


class Speeds:
    """Every way of the second part, over one bfloat16 snapshot of `nbytes`."""

    def __init__(self, nbytes: int, folder: str) -> None:
        rows = max(1, nbytes // (8 * 2 * 2048))
        self.layout = make_layout((f"layers.{i}.weight", (rows, 2048), torch.bfloat16) for i in range(8))
        self._boxes = {entry.name: full_box(entry.shape) for entry in self.layout.entries}
        self._base = torch.randint(0, 256, (self.layout.nbytes,), dtype=torch.uint8)
        self._image = self._base.clone()
        self._new = {share: self._changed(share) for share in SHARES}
        self._payload = torch.zeros_like(self._base)
        self._payloads = {share: self._payload[: self._encode(share)].clone() for share in SHARES}
        self._open(folder)
        self.ways: dict[str, Callable[[], object]] = {
            MEMCPY: lambda: self._image.copy_(self._base),
            "checksums": lambda: sums(self._base, self.layout),
            **{f"encode, {share:.0%} changed": partial(self._encode, share) for share in SHARES},
            **{f"apply, {share:.0%} changed": partial(self._apply, share) for share in SHARES},
            "file: write, fsync": self._write,
            "file: read": lambda: self._puller.pull(self._offer),
        }

    def payload(self, share: float) -> float:
        """The size of a delta, as a fraction of the snapshot's."""
        return len(self._payloads[share]) / self.layout.nbytes

    def check(self) -> None:
        """Raises RuntimeError when a way does not bring what was sent."""
        for share in SHARES:
            self._image.copy_(self._base)
            self._apply(share)
            if not torch.equal(self._image, self._new[share]):
                raise RuntimeError(f"a delta of {share:.0%} arrived as something else; do not trust the times")
        self._write()
        if not torch.equal(self._puller.pull(self._offer), self._base):
            raise RuntimeError("a file arrived as something else; do not trust the times")

    def _changed(self, share: float) -> torch.Tensor:
        new = self._base.clone()
        values = new.view(torch.int16)
        values ^= (torch.rand(len(values)) < share).to(torch.int16)
        return new

    def _encode(self, share: float) -> int:
        new = self._new[share]
        nbytes = delta.encode(new, self._base, self.layout, self._payload, version=1, base_version=0)
        assert nbytes is not None
        return nbytes

    def _apply(self, share: float) -> None:
        payloads, sources = [self._payloads[share]], [self.layout]
        delta.apply(self._image, payloads, sources, self.layout, self._boxes, version=1, base_version=0)

    def _open(self, folder: str) -> None:
        sources: list[Layout] = [self.layout]
        self._sender = FileSender(
            SenderContext(
                rank=0,
                world=1,
                layout=self.layout,
                sources=sources,
                buffers=[self._base],
                payload=None,
                deadline_s=60.0,
                folder=folder,
            )
        )
        self._puller = FilePuller(
            PullerContext(
                peer="bench",
                tp_rank=0,
                tp_world=1,
                layout=self.layout,
                sources=sources,
                needed=[self._boxes],
                links=[self._sender.link()],
                device=torch.device("cpu"),
                deadline_s=60.0,
            )
        )
        self._offer = Offer(0, 0, FULL, -1, [self.layout.nbytes], [])

    def _write(self) -> None:
        offer = Offer(self._offer.version + 1, 0, FULL, -1, [self.layout.nbytes], [])
        self._offer = Offer(**{**offer.plain(), "where": self._sender.prepare(offer)})

    def close(self) -> None:
        """Lets the folder go."""
        self._sender.close()


def measure_speeds(mb: int, rounds: int, folder: str) -> tuple[list[dict[str, Any]], int]:
    """A row for each way, and the size of the snapshot in bytes."""
    speeds = Speeds(mb << 20, folder)
    speeds.check()
    names = list(speeds.ways)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):  # the first one counts for nothing
        for name in rates.turns(names, number):
            begin = time.perf_counter()
            speeds.ways[name]()
            if number:
                times[name].append(time.perf_counter() - begin)
    speeds.close()
    payloads = {f"encode, {share:.0%} changed": round(speeds.payload(share), 4) for share in SHARES}
    rows = [
        {
            "name": name,
            "gb_s": round(speeds.layout.nbytes / statistics.median(seconds) / 1e9, 3),
            "median_ms": round(statistics.median(seconds) * 1e3, 2),
            "over_memcpy": round(rates.ratio(seconds, times[MEMCPY]), 3),
            "payload": payloads.get(name),
        }
        for name, seconds in times.items()
    ]
    return rows, speeds.layout.nbytes


# --- both


def make_result(updates: list[dict[str, Any]], speeds: list[dict[str, Any]], nbytes: int, model: str) -> Result:
    """The rows are those of both parts, one after the other."""
    by_name: Mapping[str, dict[str, Any]] = {row["name"]: row for row in speeds}
    late = [row for row in updates if row["lr"] == LEARNING_RATES[0]][-1]
    goals = [
        Goal("bfloat16_payload_at_1e-06", late["bfloat16_payload"], 0.05, "most"),
        Goal("checksums_gb_s", by_name["checksums"]["gb_s"], 5.0, "least"),
        Goal("encode_1pct_gb_s", by_name["encode, 1% changed"]["gb_s"], 0.5, "least"),
        Goal("apply_1pct_gb_s", by_name["apply, 1% changed"]["gb_s"], 0.5, "least"),
    ]
    peaks = {"bench": peak_rss_bytes()}
    return Result("delta", [*updates, *speeds], goals, peaks, extra={"nbytes": nbytes, "model": model})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m apps.bench.delta", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="smollm2", help="what the trainer loads")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps at each learning rate")
    parser.add_argument("--on-grid", action="store_true", help="leave masters on the values of a bfloat16 checkpoint")
    parser.add_argument("--mb", type=int, default=128, help="size of the snapshot of the second part in MiB")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; each runs every way once")
    parser.add_argument("--folder", help="where the file transport writes; a temporary folder if left out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="bench-delta-", dir=args.folder) as folder:
        speeds, nbytes = measure_speeds(args.mb, args.rounds, folder)
    updates = measure_updates(resolve_model(args.model), args.steps, args.on_grid)
    result = make_result(updates, speeds, nbytes, args.model)
    show(
        result,
        rows_table(f"real updates of {args.model}, AdamW", updates, SPARSITY_COLUMNS),
        rows_table(f"a bfloat16 snapshot of {nbytes / 2**20:.0f} MiB", speeds, SPEED_COLUMNS),
    )


if __name__ == "__main__":
    main()

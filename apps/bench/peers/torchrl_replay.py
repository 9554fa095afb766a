"""TorchRL's replay buffers at the work of `apps.bench.replay`: a program for the Python of a venv that has TorchRL.

    .venv-torchrl/bin/python apps/bench/peers/torchrl_replay.py '{"items": 10000, "tokens": 512, ...}'

First it says what it is; then each line of its input is `[storage, work, repeats]`, answered by the seconds of every
repeat. Items are episodes with the keys of a Group; a group is one `extend` of its episodes. `ReplayBuffer` is used
rather than `TensorDictReplayBuffer`, which adds an index to each item and takes a third longer.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

STORAGES = ("LazyTensorStorage", "LazyMemmapStorage", "ListStorage")
ADD, ADD_MANY, SAMPLE, SAVE, LOAD = WORKS = ("add", "add_many", "sample", "save", "load")


def work_of(buffer: Any, groups: list[Any], many: Any, batch: int, folder: str) -> dict[str, Callable[[int], object]]:
    """By name what is timed; each takes the number of the repeat."""
    return {
        ADD: lambda i: buffer.extend(groups[i % len(groups)]),
        ADD_MANY: lambda i: buffer.extend(many),
        SAMPLE: lambda i: buffer.sample(batch),
        SAVE: lambda i: buffer.dumps(folder),
        LOAD: lambda i: buffer.loads(folder),
    }


def main() -> None:
    """Answers until its input ends."""
    logging.disable(logging.WARNING)
    settings = json.loads(sys.argv[1])
    import torch

    torch.set_num_threads(1)
    import tensordict
    import torchrl  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from tensordict import TensorDict
    from torchrl.data import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
        LazyMemmapStorage,
        LazyTensorStorage,
        ListStorage,
        ReplayBuffer,
    )

    items, tokens, group_size = settings["items"], settings["tokens"], settings["group_size"]

    def episodes(count: int) -> Any:
        shape = (count, tokens)
        values = {
            "tokens": torch.randint(0, 32_000, shape),
            "loss_mask": torch.ones(shape, dtype=torch.bool),
            "behavior_logprobs": torch.randn(shape),
            "token_versions": torch.zeros(shape, dtype=torch.int64),
            "lengths": torch.full((count,), tokens),
            "rewards": torch.randn(count),
            "advantages": torch.randn(count),
            "group_id": torch.arange(count) // group_size,
        }
        return TensorDict(values, batch_size=[count])

    groups = [episodes(group_size) for _ in range(32)]
    many = episodes(group_size * settings["many"])
    with tempfile.TemporaryDirectory(prefix="meshforge-bench-") as scratch:
        buffers = {
            "LazyTensorStorage": ReplayBuffer(storage=LazyTensorStorage(items)),
            "LazyMemmapStorage": ReplayBuffer(storage=LazyMemmapStorage(items, scratch_dir=f"{scratch}/memmap")),
            "ListStorage": ReplayBuffer(storage=ListStorage(items), collate_fn=torch.stack),
        }
        for buffer in buffers.values():
            buffer.extend(episodes(items))
        works = {
            name: work_of(buffer, groups, many, settings["batch"], f"{scratch}/{name}")
            for name, buffer in buffers.items()
        }
        print(json.dumps({"torchrl": torchrl.__version__, "tensordict": tensordict.__version__}), flush=True)
        for line in sys.stdin:
            storage, work, repeats = json.loads(line)
            times = []
            for number in range(repeats):
                start = time.perf_counter()
                works[storage][work](number)
                times.append(time.perf_counter() - start)
            print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()

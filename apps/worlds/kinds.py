"""Several kinds of environments in one run, and in what order their tasks come. Pure.

What a quota promises. A group holds a slot of the replay from its first token until the generators have the weights
that it made; every group that ends well is trained, and how many are under way is bounded by `replay.max_staleness`. So
neither slots nor places in batches have to be divided while a run goes on: whoever divides the *order of prompts* has
divided both. With a share s of the groups for a kind

1. of the first n groups of a run, for every n, the kind has more than s n - 1 and fewer than s n + 1; so fast kinds
   cannot crowd a slow one out of the batches, nor the other way round;
2. of the (S + 1) B slots (S = max_staleness, B groups a batch) it holds fewer than s (2 S + 1) B + 1: those are its
   groups among the S B that were trained while its oldest one ran, and the (S + 1) B that may be under way. So a kind
   whose every episode takes an hour holds less than twice its share of the slots.

No prompt is skipped or kept for later: each kind has an order of its own, in which its rows come epoch after epoch, and
what a resumed run goes on with is a place in the one order that these make. A group that is dropped gives its slot to
the next in that order, of whichever kind; `extra/env/<kind>/groups_share` tells what came of it.

Which kind is next is what a processor that is shared proportionally would serve next (Baruah, Cohen, Plaxton and
Varvel, "Proportionate progress", 1996): of those that are not ahead of their share, the one first to fall behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from random import Random
from typing import Any

from forge.data import DataConfig, Rows, load_task
from forge.errors import ConfigError


def shares_of(kinds: Sequence[str], quotas: Mapping[str, float]) -> dict[str, Fraction]:
    """The share of each kind; those without a quota divide the rest equally. Raises ConfigError."""
    if unknown := [name for name in quotas if name not in kinds]:
        raise ConfigError(
            f"quotas has {unknown[0]!r}, which is none of the environments {', '.join(kinds)}; name those"
        )
    # As they are written: three quotas of 0.1 and one of 0.7 are a whole, though the sum of the floats is not.
    given = {name: Fraction(str(share)) for name, share in quotas.items()}
    if bad := [name for name, share in given.items() if not 0 < share <= 1]:
        raise ConfigError(f"quotas.{bad[0]} must lie in (0, 1], got {quotas[bad[0]]}; leave out what has none")
    rest, others = 1 - sum(given.values(), Fraction()), [name for name in kinds if name not in given]
    if rest < 0 or (rest == 0) == bool(others):
        raise ConfigError(
            f"quotas add up to {float(1 - rest):g}, and {len(others)} kinds have none ({', '.join(others) or '-'}); "
            "let them add up to 1, or to less and leave out at least one kind, which gets the rest"
        )
    return {name: given[name] if name in given else rest / len(others) for name in kinds}


def in_turn(shares: Mapping[str, Fraction]) -> Iterator[str]:
    """Names for ever: of the first n, each `shares[name] * n`, give or take less than one."""
    taken = dict.fromkeys(shares, 0)
    number = 0
    while True:
        ready = [name for name, share in shares.items() if math.floor(taken[name] / share) <= number]
        name = min(ready, key=lambda name: (math.ceil((taken[name] + 1) / shares[name]), name))
        taken[name] += 1
        number += 1
        yield name


def interleaved(
    task: str,
    args: dict[str, Any],
    path: str | None,
    size: int | None,
    shares: dict[str, str],
    seed: int,
    shuffle: bool,
) -> Interleaved:
    """Rows of another data.task in the order of `shares`, for a DataConfig. Reads every row once to see its kind."""
    rows = load_task(DataConfig(task, args, path, size))
    return Interleaved(rows, {name: Fraction(share) for name, share in shares.items()}, seed, shuffle)


class Interleaved:
    """Rows of several kinds for ever; the same from each `iter` on."""

    def __init__(self, rows: Any, shares: Mapping[str, Fraction], seed: int, shuffle: bool) -> None:
        """Raises ConfigError for rows without an index, and where a kind has none."""
        if not isinstance(rows, Rows):
            raise ConfigError("quotas need rows with len() and an index; this data.task gives a stream of them")
        self._rows, self._shares, self._seed, self._shuffle = rows, shares, seed, shuffle
        self._of_kind: dict[str, list[int]] = {name: [] for name in shares}
        for number in range(len(rows)):
            kind = (rows[number].get("metadata") or {}).get("environment")
            if not isinstance(kind, str) or kind not in shares:
                raise ConfigError(
                    f"row {number} of data.task has environment {kind!r} in its metadata, which is none of "
                    f"{', '.join(shares)}; name one of them"
                )
            self._of_kind[kind].append(number)
        if empty := [name for name, numbers in self._of_kind.items() if not numbers]:
            raise ConfigError(f"no row of data.task is for environment {empty[0]}; leave it out, or give it tasks")

    def __iter__(self) -> Iterator[Any]:
        order = {name: self._epochs(name) for name in self._shares}
        return (self._rows[next(order[name])] for name in in_turn(self._shares))

    def _epochs(self, kind: str) -> Iterator[int]:
        rng = Random(f"{self._seed}/{kind}")
        while True:
            numbers = list(self._of_kind[kind])
            if self._shuffle:
                rng.shuffle(numbers)
            yield from numbers


def divided(data: DataConfig, shares: Mapping[str, Fraction], seed: int) -> DataConfig:
    """`data` with its rows in the order of `shares`."""
    arguments = {
        "task": data.task,
        "args": data.args,
        "path": data.path,
        "size": data.size,
        "shares": {name: str(share) for name, share in shares.items()},
        "seed": seed,
        "shuffle": data.shuffle,
    }
    task = f"{__name__}:interleaved"
    return DataConfig(
        task, arguments, shuffle=False, system_prompt=data.system_prompt, template_args=data.template_args
    )

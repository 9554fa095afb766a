"""Two ways to write one conversation in tokens, compared: where do they part, and does that matter? Pure.

The same text can be tokenised in several ways, and a policy samples any of them: in and beside what was sampled, other
tokens for the same text are expected. Anything else is a real difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Parting:
    """`ours[index]` and `theirs[other]` are the first tokens that differ here."""

    index: int
    other: int


@dataclass(frozen=True)
class Comparison:
    """What `compare` found: the first real difference, and each place before it where sampled text has other tokens."""

    real: Parting | None
    retokenised: list[Parting]


def compare(
    ours: Sequence[int],
    theirs: Sequence[int],
    sampled: Sequence[bool],
    bytes_of: Callable[[int], bytes],
    *,
    unfinished: bool = False,
) -> Comparison:
    """Walks both, from one place where both have a border between tokens to the next.

    `sampled` runs along `ours`, `bytes_of` is the text of one token. With `unfinished`, `theirs` may go on behind the
    end of `ours`.
    """
    retokenised: list[Parting] = []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        if ours[i] == theirs[j]:
            i, j = i + 1, j + 1
            continue
        place = Parting(i, j)
        i, j, alike = _next_border(ours, theirs, i, j, bytes_of)
        ours_ended = unfinished and i == len(ours)
        # A tokenizer looks ahead: what stands beside a sampled text may be cut otherwise because of it.
        beside = sampled[max(place.index - 1, 0) : i + 1]
        if not (alike or ours_ended) or not any(beside):
            return Comparison(place, retokenised)
        if not alike and not _same_start(ours[place.index : i], theirs[place.other : j], bytes_of):
            return Comparison(place, retokenised)
        retokenised.append(place)
    if i < len(ours) or (j < len(theirs) and not unfinished):
        return Comparison(Parting(i, j), retokenised)
    return Comparison(None, retokenised)


def _next_border(
    ours: Sequence[int], theirs: Sequence[int], i: int, j: int, bytes_of: Callable[[int], bytes]
) -> tuple[int, int, bool]:
    """Where both have said the same text again, from `i` and `j` on; False where they never do."""
    a, b = bytes_of(ours[i]), bytes_of(theirs[j])
    i, j = i + 1, j + 1
    while a != b:
        short = min(len(a), len(b))
        if a[:short] != b[:short]:
            return i, j, False
        a, b = a[short:], b[short:]
        if not a and i < len(ours):
            a, i = bytes_of(ours[i]), i + 1
        elif not b and j < len(theirs):
            b, j = bytes_of(theirs[j]), j + 1
        else:
            return i, j, False
    return i, j, True


def _same_start(ours: Sequence[int], theirs: Sequence[int], bytes_of: Callable[[int], bytes]) -> bool:
    """Whether the text of `ours` begins that of `theirs`."""
    return b"".join(map(bytes_of, theirs)).startswith(b"".join(map(bytes_of, ours)))

"""Sampled tokens as text: in pieces of whole characters, and up to where a stop cuts them. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from actors.environments.templates import ChatTemplate
from actors.vllm_engine import Completion


@dataclass(frozen=True)
class Piece:
    """Some text, and the sampled tokens that it is of: `first` up to before `end`. The text may be empty."""

    text: str
    first: int
    end: int


@dataclass(frozen=True)
class Spoken:
    """An answer and its text."""

    answer: Completion
    text: str
    """Without the end of the turn, and without what a stop cut off."""
    pieces: list[Piece]
    """Of all its tokens, one a token where characters are not split."""
    token_bytes: list[bytes]


def spoken(template: ChatTemplate, answer: Completion, stops: Sequence[str], prompt: int) -> Spoken:
    """What was said behind a prompt of so many tokens.

    Of an answer that has a stop, tokens behind it are forgotten, as if sampling had ended there: what is left was
    sampled just the same. The text ends before the stop.
    """
    token_bytes = [template.bytes_of(token) for token in answer.token_ids]
    end = _end_of_stop(token_bytes, stops)
    if end is not None:
        answer = first_tokens(answer, end, prompt)
        token_bytes = token_bytes[:end]
    text = template.answered(answer.token_ids, answer.finish_reason)
    places = [place for stop in stops if (place := text.find(stop)) >= 0] if end is not None else []
    return Spoken(answer, text[: min(places, default=len(text))], pieces_of(token_bytes), token_bytes)


def pieces_of(token_bytes: Sequence[bytes]) -> list[Piece]:
    """Text of tokens, each with as many as its characters need; what is left at the end is replaced."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces: list[Piece] = []
    first = 0
    for n, some in enumerate(token_bytes):
        text = decoder.decode(some)
        if text or not decoder.getstate()[0]:
            pieces.append(Piece(text, first, n + 1))
            first = n + 1
    if rest := decoder.decode(b"", final=True):
        pieces.append(Piece(rest, first, len(token_bytes)))
    return pieces


def deltas(content: str, pieces: Sequence[Piece]) -> list[Piece]:
    """`content` in the pieces in which it was sampled, as far as it is what was sampled; then its rest in one.

    All tokens are in one of them, those of tool calls and of the turn's end in the last.
    """
    found: list[Piece] = []
    at = 0
    for piece in pieces:
        if not piece.text or not content.startswith(piece.text, at):
            break
        found.append(piece)
        at += len(piece.text)
    first, end = (found[-1].end if found else 0), (pieces[-1].end if pieces else 0)
    if at < len(content) or first < end:
        found.append(Piece(content[at:], first, end))
    return found


def first_tokens(answer: Completion, count: int, prompt: int) -> Completion:
    """Without what was sampled behind the first `count` tokens; `prompt` tokens were before it."""
    return Completion(
        answer.token_ids[:count],
        answer.logprobs[:count],
        answer.versions[:count],
        "stop",
        None if answer.kept is None else answer.kept[:count],
        None if answer.routes is None else answer.routes[: prompt + count],
    )


def _end_of_stop(token_bytes: Sequence[bytes], stops: Sequence[str]) -> int | None:
    """How many tokens there are up to the end of the first stop; None where there is none."""
    said = b"".join(token_bytes)
    ends = [at + len(stop.encode()) for stop in stops if (at := said.find(stop.encode())) >= 0]
    if not ends:
        return None
    lengths = accumulate(map(len, token_bytes))
    return next(n + 1 for n, length in enumerate(lengths) if length >= min(ends))

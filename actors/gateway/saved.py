"""A session as plain values: a heading, and one entry for each thing that happened, so that it can grow. Pure.

{"session": {...}}  {"turn": {...}}  {"reward": {...}}  {"ended": true}
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

import torch

from actors.gateway.config import SessionLimits
from actors.gateway.sessions import Session, Turn
from actors.vllm_engine import Completion
from forge.errors import GatewayError

Entry = dict[str, Any]
_FORMAT = 1


def state_of(session: Session) -> list[Entry]:
    """All of it, its key included; `session_of` makes it again."""
    entries = [heading(session), *map(turn_entry, session.turns)]
    entries += [reward_entry(value, turn) for value, turn in session.rewards]
    return [*entries, {"ended": True}] if session.ended else entries


def heading(session: Session) -> Entry:
    """What a session is opened with."""
    own = {"id": session.id, "key": session.key, "expires": session.expires, "seed": session.seed}
    return {"session": {"format": _FORMAT, **own, "limits": asdict(session.limits)}}


def turn_entry(turn: Turn) -> Entry:
    """Supports and routes as lists."""
    plain = {one.name: getattr(turn, one.name) for one in fields(turn) if one.init}
    answer = turn.answer
    columns = {name: getattr(answer, name) for name in ("token_ids", "logprobs", "versions", "finish_reason")}
    tensors = {name: _saved(getattr(answer, name)) for name in ("kept", "routes")}
    return {"turn": {**plain, "answer": {**columns, **tensors}}}


def reward_entry(value: float, turn: str) -> Entry:
    """turn: its id, or "" for the session's."""
    return {"reward": {"value": value, "turn": turn}}


def session_of(entries: Iterable[Entry]) -> Session:
    """The session of `state_of`. Raises GatewayError for what is none."""
    first, *rest = entries
    own = dict(first.get("session") or {})
    if own.pop("format", None) != _FORMAT:
        raise GatewayError(500, f"a saved session begins with a session of format {_FORMAT}, got {str(first)[:200]}")
    session = Session(**{**own, "limits": SessionLimits(**own["limits"])})
    for entry in rest:
        if "turn" in entry:
            answer = dict(entry["turn"]["answer"])
            for name in ("kept", "routes"):
                answer[name] = _loaded(answer[name])
            turn = Turn(**{**entry["turn"], "answer": Completion(**answer)})
            session.next_seed([*session.tokens(turn.parent), *turn.given])  # counts that this was asked
            session.add(turn)
        elif "reward" in entry:
            session.reward(**entry["reward"])
        else:
            session.ended = True
    return session


def _saved(tensor: torch.Tensor | None) -> Entry | None:
    if tensor is None:
        return None
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "rows": tensor.tolist()}


def _loaded(saved: Entry | None) -> torch.Tensor | None:
    if saved is None:
        return None
    return torch.tensor(saved["rows"], dtype=getattr(torch, saved["dtype"])).reshape(saved["shape"])

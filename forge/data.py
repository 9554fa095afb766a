"""Tasks and prompts: what the policy is asked, in an order that a restart continues.

A *task* is a function that returns rows: any map-style data set (`len(rows)`, `rows[i]`), a list, a Hugging Face data
set, a class of your own; or, where there is neither length nor index, any iterable that begins anew with each
`iter(rows)`, endless or not. A row is a mapping with

    messages   list of {"role", "content"}   goes through the tokenizer's chat template, or else
    prompt     str                           is tokenized as it stands
    answer     anything picklable            what the reward compares with; optional
    metadata   dict                          handed to the reward as it is; optional

    rows ── load_task ──► PromptStream ── next() ──► Prompt (text and token ids), epoch after epoch
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from forge import registry
from forge.errors import ConfigError
from forge.streamed_rows import Passes, Row

Encoder = Callable[[Row], tuple[str, list[int]]]
"""A row to the text and the token ids that the policy continues."""
AnswerOf = Callable[[Row], Any]
"""A row to the `answer` of its prompt."""


@runtime_checkable
class Rows(Protocol):
    """A map-style data set of rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


@dataclass
class DataConfig:
    """The task and its prompts."""

    task: str = "apps.grpo.tasks:add_digits"
    """module:function that returns the rows."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the task's function, such as {num_digits: 4}."""
    path: str | None = None
    """Passed to the task as `path` when set: a file, a folder or a hub name, as the task takes it."""
    size: int | None = None
    """Use the first `size` rows only."""
    shuffle: bool = True
    """Draw the rows in a new order each epoch; else always in theirs."""
    system_prompt: str | None = None
    """Put before the messages of every row as a system turn."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """Extra variables of the chat template, such as {enable_thinking: false}."""

    def validate(self) -> None:
        """Raises ConfigError when the task cannot be imported or called like this; loads no data."""
        if self.size is not None and self.size < 1:
            raise ConfigError(f"data.size must be >= 1, got {self.size}; leave it out for all rows")
        task = registry.load(self.task, "data.task")
        try:
            inspect.signature(task).bind(**self.keywords)
        except TypeError as error:
            raise ConfigError(
                f"data.task {self.task} cannot be called with {self.keywords}: {error}; "
                f"it takes {inspect.signature(task)}, given by data.args and data.path"
            ) from error

    @property
    def keywords(self) -> dict[str, Any]:
        """What the task's function is called with."""
        return {**self.args, **({} if self.path is None else {"path": self.path})}


def load_task(cfg: DataConfig) -> Any:
    """The task's rows (`Rows`, or an iterable of them), with `size` and `system_prompt` applied.

    Raises ConfigError when there are none.
    """
    cfg.validate()
    rows = registry.load(cfg.task, "data.task")(**cfg.keywords)
    if not isinstance(rows, Rows):
        if not hasattr(rows, "__iter__") or iter(rows) is rows:
            raise ConfigError(
                f"data.task {cfg.task} returned a {type(rows).__name__}; it must return rows with len() and an index, "
                "such as a list, or an object whose __iter__ begins anew"
            )
        if cfg.size is None and cfg.system_prompt is None:
            return rows
        return _StreamView(rows, cfg.size, cfg.system_prompt)
    if not len(rows):
        raise ConfigError(f"data.task {cfg.task} returned 0 rows; training needs at least one prompt")
    return _View(rows, cfg.size, cfg.system_prompt)


@dataclass(frozen=True)
class _View:
    """The first rows of a task, each under a system turn; rows are read when asked for."""

    rows: Rows
    size: int | None
    system_prompt: str | None

    def __len__(self) -> int:
        return min(len(self.rows), self.size or len(self.rows))

    def __getitem__(self, index: int) -> Row:
        return _under(self.system_prompt, self.rows[index])


@dataclass(frozen=True)
class _StreamView:
    """The same of rows without an index. Read again up to where a resumed stream stands."""

    rows: Iterable[Row]
    size: int | None
    system_prompt: str | None

    def __iter__(self) -> Iterator[Row]:
        return (_under(self.system_prompt, row) for row in islice(self.rows, self.size))


def _under(system_prompt: str | None, row: Row) -> Row:
    if system_prompt is None or "messages" not in row:
        return row
    return {**row, "messages": [{"role": "system", "content": system_prompt}, *row["messages"]]}


def make_encoder(tokenizer: Any, template_args: Mapping[str, Any] | None = None) -> Encoder:
    """Encodes rows with a Hugging Face tokenizer: the chat template for `messages`, plain text for `prompt`.

    Special tokens come from the template where there is one, so none is added twice.
    """

    def encode(row: Row) -> tuple[str, list[int]]:
        if "messages" not in row:
            return row["prompt"], list(tokenizer(row["prompt"]).input_ids)
        if not tokenizer.chat_template:
            raise ConfigError(
                "the task's rows have `messages`, but the model's tokenizer has no chat template; "
                "use an instruction-tuned model, or rows with `prompt`"
            )
        text = tokenizer.apply_chat_template(
            row["messages"], tokenize=False, add_generation_prompt=True, **(template_args or {})
        )
        return text, list(tokenizer(text, add_special_tokens=False).input_ids)

    return encode


@dataclass(frozen=True)
class Prompt:
    """One question to the policy. `(epoch, id)` names it uniquely within a run."""

    id: int
    """Index of its row."""
    epoch: int
    """How many times every row had been handed out before, 0 at first."""
    text: str
    """What the policy continues, special tokens of the chat template included."""
    token_ids: list[int]
    """The same in tokens; never empty."""
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


class PromptStream:
    """Prompts for ever: epoch after epoch, each a permutation of all rows that depends on (seed, epoch) only.

    Rows without an index come in their own order, whatever `shuffle` says. `state_dict()` says how far the stream has
    come; a stream over the same rows that loads it goes on with the very next prompt. `answer_of` picks what a prompt
    carries as its answer. Raises ConfigError for an empty data set, and for rows that cannot be encoded.
    """

    def __init__(
        self,
        rows: Rows | Iterable[Row],
        encode: Encoder,
        seed: int = 0,
        *,
        shuffle: bool = True,
        answer_of: AnswerOf = lambda row: row.get("answer"),
    ) -> None:
        prompts: _Prompts | Passes
        order: _Order | None = None
        if isinstance(rows, Rows):
            if not len(rows):
                raise ConfigError("the data set has 0 rows; a stream of prompts needs at least one")
            self._setting = {"rows": len(rows), "seed": seed, "shuffle": shuffle}
            prompts, order = _Prompts(rows, encode, answer_of), _Order(len(rows), seed, shuffle)
        else:
            self._setting = {"rows": -1, "seed": seed, "shuffle": False}
            prompts = Passes(rows, lambda epoch, number, row: _prompt(epoch, number, row, encode, answer_of))
        with warnings.catch_warnings():
            # torchdata 0.11 calls a function that torch deprecates.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            self._loader: StatefulDataLoader[Prompt] = StatefulDataLoader(
                prompts,
                batch_size=None,
                sampler=order,
                collate_fn=lambda prompt: prompt,
                # The loader draws a seed when it starts; not from the global generator of the run.
                generator=torch.Generator().manual_seed(seed),
            )
        self._iterator: Iterator[Prompt] | None = None
        self._peeked: tuple[Prompt, dict[str, Any]] | None = None

    async def next(self) -> Prompt:
        """The next prompt; there always is one. Waits for nothing; each caller gets another prompt."""
        return self.draw()

    def draw(self) -> Prompt:
        """`next`, for callers without an event loop."""
        if self._peeked is not None:
            (prompt, _), self._peeked = self._peeked, None
            return prompt
        if self._iterator is None:
            self._iterator = iter(self._loader)
        return next(self._iterator)

    def peek(self) -> Prompt:
        """The prompt that `next` will return."""
        if self._peeked is None:
            before = self.state_dict()
            self._peeked = self.draw(), before
        return self._peeked[0]

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands; plain values only, where those of the rows are."""
        return self._peeked[1] if self._peeked is not None else {**self._setting, "loader": self._loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on after the last prompt before `state_dict()`; ConfigError if that was another stream's."""
        for key, value in self._setting.items():
            if state[key] != value:
                raise ConfigError(
                    f"the saved prompt stream has {key} = {state[key]}, this one {value}; "
                    "resume with the configuration of the run that saved it"
                )
        self._peeked = None
        self._loader.load_state_dict(dict(state["loader"]))
        self._iterator = iter(self._loader)


class _Prompts:
    """Map-style data set of prompts; its index is (epoch, row)."""

    def __init__(self, rows: Rows, encode: Encoder, answer_of: AnswerOf) -> None:
        self._rows = rows
        self._encode, self._answer_of = encode, answer_of

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: tuple[int, int]) -> Prompt:
        epoch, number = index
        return _prompt(epoch, number, self._rows[number], self._encode, self._answer_of)


def _prompt(epoch: int, number: int, row: Row, encode: Encoder, answer_of: AnswerOf) -> Prompt:
    if ("messages" in row) == ("prompt" in row):
        raise ConfigError(f"row {number} has the keys {sorted(row)}; it needs one of `messages` and `prompt`")
    text, token_ids = encode(row)
    if not token_ids:
        raise ConfigError(f"row {number} has 0 tokens; a completion needs at least one token before it")
    return Prompt(number, epoch, text, token_ids, answer_of(row), dict(row.get("metadata") or {}))


class _Order(Sampler[tuple[int, int]]):
    """(epoch, row) for ever. Its own iterator, so that the loader restores it without replaying it."""

    def __init__(self, num_rows: int, seed: int, shuffle: bool) -> None:
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._start(epoch=0, position=0)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self

    def __next__(self) -> tuple[int, int]:
        if self._position == self._num_rows:
            self._start(self._epoch + 1, 0)
        self._position += 1
        return self._epoch, self._rows[self._position - 1]

    def _start(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._rows = _permutation(self._num_rows, self._seed, epoch) if self._shuffle else range(self._num_rows)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._start(state["epoch"], state["position"])


def _permutation(n: int, seed: int, epoch: int) -> Sequence[int]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randperm(n, generator=generator).tolist()

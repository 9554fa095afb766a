"""Prompts come in permutations of the rows, for ever, and a restart neither loses nor repeats one."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from forge import registry
from forge.data import DataConfig, Prompt, PromptStream, load_task, make_encoder
from forge.errors import ConfigError

ROWS = [{"prompt": f"p{i}", "answer": i, "metadata": {"i": i}} for i in range(7)]


def encode(row: Mapping[str, Any]) -> tuple[str, list[int]]:
    return row["prompt"], [ord(c) for c in row["prompt"]]


def take(stream: PromptStream, n: int) -> list[Prompt]:
    async def main() -> list[Prompt]:
        return [await stream.next() for _ in range(n)]

    return asyncio.run(main())


def names(prompts: list[Prompt]) -> list[tuple[int, int]]:
    return [(prompt.epoch, prompt.id) for prompt in prompts]


def test_every_epoch_is_another_permutation_of_all_rows() -> None:
    prompts = take(PromptStream(ROWS, encode, seed=3), 5 * len(ROWS))
    epochs = [names(prompts[e * 7 : e * 7 + 7]) for e in range(5)]
    for number, epoch in enumerate(epochs):
        assert {e for e, _ in epoch} == {number}
        assert sorted(i for _, i in epoch) == list(range(7))
    assert len({tuple(i for _, i in epoch) for epoch in epochs}) > 1


def test_what_a_prompt_carries_as_its_answer_is_for_the_caller_to_pick() -> None:
    def answer_of(row: Mapping[str, Any]) -> Any:
        return (row["prompt"], row["answer"])

    for rows in (ROWS, type("Stream", (), {"__iter__": lambda self: iter(ROWS)})()):
        prompts = take(PromptStream(rows, encode, answer_of=answer_of), 7)
        assert sorted(p.answer for p in prompts) == [(f"p{i}", i) for i in range(7)]


def test_the_order_depends_on_the_seed_only() -> None:
    assert names(take(PromptStream(ROWS, encode, seed=3), 30)) == names(take(PromptStream(ROWS, encode, seed=3), 30))
    assert names(take(PromptStream(ROWS, encode, seed=3), 30)) != names(take(PromptStream(ROWS, encode, seed=4), 30))


def test_without_shuffling_rows_come_in_their_order() -> None:
    prompts = take(PromptStream(ROWS, encode, shuffle=False), 10)
    assert names(prompts) == [(0, i) for i in range(7)] + [(1, i) for i in range(3)]


def test_a_prompt_carries_text_tokens_answer_and_metadata() -> None:
    (prompt,) = take(PromptStream(ROWS, encode, shuffle=False), 1)
    assert prompt == Prompt(0, 0, "p0", [112, 48], answer=0, metadata={"i": 0})


def test_concurrent_callers_get_different_prompts() -> None:
    async def main() -> list[Prompt]:
        stream = PromptStream(ROWS, encode)
        return list(await asyncio.gather(*(stream.next() for _ in range(14))))

    assert len(set(names(asyncio.run(main())))) == 14


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("cut", range(16))
def test_a_stream_that_loads_a_state_goes_on_with_the_very_next_prompt(cut: int, shuffle: bool) -> None:
    whole = names(take(PromptStream(ROWS, encode, seed=1, shuffle=shuffle), 30))
    first = PromptStream(ROWS, encode, seed=1, shuffle=shuffle)
    before = names(take(first, cut))
    state = json.loads(json.dumps(first.state_dict()))
    second = PromptStream(ROWS, encode, seed=1, shuffle=shuffle)
    second.load_state_dict(state)
    assert second.peek() == first.peek()
    assert before + names(take(second, 30 - cut)) == whole
    assert names(take(first, 30 - cut)) == whole[cut:]


def test_many_restarts_make_one_permutation_an_epoch() -> None:
    state, seen = None, []
    for length in (1, 0, 3, 2, 5, 1, 9):
        stream = PromptStream(ROWS, encode, seed=2)
        if state is not None:
            stream.load_state_dict(state)
        seen += names(take(stream, length))
        state = stream.state_dict()
    assert seen == names(take(PromptStream(ROWS, encode, seed=2), 21))


def test_a_running_stream_can_be_put_back() -> None:
    stream = PromptStream(ROWS, encode)
    state = stream.state_dict()
    first = names(take(stream, 10))
    stream.load_state_dict(state)
    assert names(take(stream, 10)) == first


@pytest.mark.parametrize(
    "other, told",
    [
        (PromptStream(ROWS[:5], encode), "rows = 7, this one 5"),
        (PromptStream(ROWS, encode, seed=1), "seed = 0, this one 1"),
        (PromptStream(ROWS, encode, shuffle=False), "shuffle = True, this one False"),
    ],
)
def test_the_state_of_another_stream_is_refused(other: PromptStream, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        other.load_state_dict(PromptStream(ROWS, encode).state_dict())


def test_peeking_takes_nothing_away_also_at_the_end_of_an_epoch() -> None:
    stream = PromptStream(ROWS, encode)
    for _ in range(16):
        seen = stream.peek()
        assert stream.peek() == seen
        assert take(stream, 1) == [seen]


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    take(PromptStream(ROWS, encode), 8)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "rows, told",
    [
        ([], "0 rows"),
        ([{"answer": 1}], r"row 0 has the keys \['answer'\]"),
        ([{"prompt": "a", "messages": []}], "needs one of `messages` and `prompt`"),
        ([{"prompt": ""}], "row 0 has 0 tokens"),
    ],
)
def test_rows_that_cannot_be_prompts_are_refused(rows: list[dict[str, Any]], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        take(PromptStream(rows, encode), 1)


# ---- encoding ---------------------------------------------------------------------------------------


def word_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    """Words to ids; puts <bos> before every plain text, as many models' tokenizers do."""
    words = ["<bos>", "<unk>", "hello", "world", "user", "system", "be", "brief", "assistant", "yes"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", unk_token="<unk>", chat_template=chat_template
    )


TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}{% if say_yes %} yes{% endif %}"
)
HELLO = {"messages": [{"role": "user", "content": "hello world"}]}


def test_plain_text_is_tokenized_as_it_stands() -> None:
    assert make_encoder(word_tokenizer(None))({"prompt": "hello world"}) == ("hello world", [0, 2, 3])


def test_messages_go_through_the_chat_template_with_one_start_token() -> None:
    text, ids = make_encoder(word_tokenizer(TEMPLATE))(HELLO)
    assert text == "<bos> user hello world assistant"
    assert ids == [0, 4, 2, 3, 8]


def test_the_chat_template_gets_extra_variables() -> None:
    _, ids = make_encoder(word_tokenizer(TEMPLATE), {"say_yes": True})(HELLO)
    assert ids == [0, 4, 2, 3, 8, 9]


def test_messages_without_a_chat_template_are_refused() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        make_encoder(word_tokenizer(None))(HELLO)


# ---- rows without an index ------------------------------------------------------------------------------


class Stream:
    """Begins anew with each pass; endless where `count` is None."""

    def __init__(self, count: int | None) -> None:
        self.count, self.read = count, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i in itertools.count() if self.count is None else range(self.count):
            self.read += 1
            yield {"prompt": f"p{i}", "answer": i}


class StatefulStream(Stream):
    """Knows where it stands, as a Hugging Face IterableDataset does."""

    at = begin = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        begin, self.begin = self.begin, 0
        for self.at, row in enumerate(itertools.islice(super().__iter__(), begin, None), begin + 1):
            yield row
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.begin = self.at = state["at"]


@pytest.mark.parametrize("rows", [Stream, StatefulStream])
@pytest.mark.parametrize("count", [1, 5, None])
@pytest.mark.parametrize("cut", [0, 1, 4, 5, 13])
def test_a_stream_without_an_index_goes_on_where_it_stood(rows: type[Stream], count: int | None, cut: int) -> None:
    whole = names(take(PromptStream(rows(count), encode), 20))
    per_epoch = count or 20
    assert whole == [(i // per_epoch, i % per_epoch) for i in range(20)]
    first = PromptStream(rows(count), encode)
    assert names(take(first, cut)) == whole[:cut]
    state = first.state_dict()
    assert names(take(first, 3)) == whole[cut : cut + 3], "reading the state moved the stream"
    second = PromptStream(rows(count), encode)
    second.load_state_dict(state)
    assert names([second.peek()]) == whole[cut : cut + 1]
    assert second.state_dict()["rows"] == -1
    assert names(take(second, 20 - cut)) == whole[cut:]


def test_a_peek_is_not_in_the_state() -> None:
    stream = PromptStream(Stream(None), encode)
    take(stream, 2)
    assert names([stream.peek(), stream.peek()]) == [(0, 2), (0, 2)]
    other = PromptStream(Stream(None), encode)
    other.load_state_dict(stream.state_dict())
    assert names(take(other, 2)) == names(take(stream, 2)) == [(0, 2), (0, 3)]


def test_a_stream_of_no_rows_is_refused_when_it_is_read() -> None:
    with pytest.raises(ConfigError, match="the data set has 0 rows"):
        PromptStream(Stream(0), encode).peek()


def test_rows_that_can_be_read_once_only_are_refused() -> None:
    with pytest.raises(ConfigError, match="can be read once only"):
        PromptStream((row for row in ROWS), encode)


# ---- tasks from the configuration -------------------------------------------------------------------

USER_TASK = """
TABLE = 3
def rows(n=4, path="none"):
    return [{"messages": [{"role": "user", "content": str(i)}], "answer": path} for i in range(n)]
def plain(): return [{"prompt": "hello"}]
def empty(): return []
def generator(): yield {"prompt": "a"}
class Endless:
    def __iter__(self):
        i = 0
        while True:
            yield {"messages": [{"role": "user", "content": str(i)}]}
            i += 1
def endless(): return Endless()
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"user_task_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(USER_TASK)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_task_is_called_with_its_arguments_and_cut_to_size(user_module: str) -> None:
    rows = load_task(DataConfig(f"{user_module}:rows", args={"n": 6}, path="a file", size=5))
    assert len(rows) == 5
    assert rows[4] == {"messages": [{"role": "user", "content": "4"}], "answer": "a file"}
    assert len(load_task(DataConfig(f"{user_module}:rows", size=100))) == 4


def test_a_system_prompt_comes_before_the_messages_and_leaves_plain_prompts_alone(user_module: str) -> None:
    row = load_task(DataConfig(f"{user_module}:rows", system_prompt="be brief"))[0]
    assert [m["role"] for m in row["messages"]] == ["system", "user"]
    assert load_task(DataConfig(f"{user_module}:plain", system_prompt="be brief"))[0] == {"prompt": "hello"}


def test_a_task_may_be_endless(user_module: str) -> None:
    rows = load_task(DataConfig(f"{user_module}:endless", size=3, system_prompt="be brief"))
    stream = PromptStream(rows, lambda row: (row["messages"][1]["content"], [len(row["messages"])]))
    prompts = take(stream, 5)
    assert names(prompts) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert [p.text for p in prompts] == ["0", "1", "2", "0", "1"]
    assert {p.token_ids[0] for p in prompts} == {2}
    assert len(take(PromptStream(load_task(DataConfig(f"{user_module}:endless")), lambda row: ("x", [1])), 50)) == 50


@pytest.mark.parametrize(
    "function, settings, told",
    [
        ("missing", {}, "has no attribute 'missing'"),
        ("TABLE", {}, "which is a int"),
        ("rows", {"args": {"m": 1}}, "unexpected keyword argument 'm'"),
        ("plain", {"path": "x"}, "unexpected keyword argument 'path'"),
        ("rows", {"size": 0}, "size must be >= 1, got 0"),
        ("empty", {}, "returned 0 rows"),
        ("generator", {}, "returned a generator"),
    ],
)
def test_a_task_that_cannot_work_is_refused(
    user_module: str, function: str, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        load_task(DataConfig(f"{user_module}:{function}", **settings))


@pytest.mark.parametrize("path", ["json", "json:", "a:b:c", "no.such:thing", "json:no_such"])
def test_a_path_that_leads_nowhere_names_its_option(path: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.task") as caught:
        registry.load(path, "data.task")
    assert repr(path) in str(caught.value)

"""Laws of a session: what was sampled is trained once, behind exactly what the policy saw."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from talking import chat_template, letters

from actors.environments.transcript import Transcript
from actors.gateway.answers import Piece, deltas, pieces_of, spoken
from actors.gateway.config import GatewayConfig, SessionLimits
from actors.gateway.conversations import message_key, plain_messages
from actors.gateway.journal import Journal
from actors.gateway.requests import chat_request, read_json
from actors.gateway.saved import heading, session_of, state_of, turn_entry
from actors.gateway.sessions import Session, Turn
from actors.vllm_engine import Completion
from forge.batch import check_batch
from forge.episodes import make_episodes_group
from forge.errors import ConfigError, GatewayError

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Agent:
    """Asks a session, and remembers what the policy saw and said each time."""

    def __init__(self, **limits: Any) -> None:
        self.session = Session("s", "key", SessionLimits(**limits), 100.0)
        self.template = chat_template()
        self.saw: dict[str, list[int]] = {}
        self.count = 0

    def ask(self, messages: list[Message], text: str, *, whole: bool = True, finish: str = "stop") -> list[Message]:
        """The conversation with the policy's answer `text`, sampled letter by letter or as the tokenizer would."""
        call = self.session.begin(plain_messages(messages), [], 0.0)
        given_tokens = call.given(self.template)
        ids = self.template.encode(text, inside=True) if whole else letters(self.template, text)
        ids += self.template.end_of_turn[:1] if finish == "stop" else []
        # A log-prob of its own for each token: whom it belongs to is seen later.
        logprobs = [-float(self.count + n) for n in range(len(ids))]
        self.count += len(ids)
        answer = Completion(ids, logprobs, [len(self.session.turns)] * len(ids), finish)
        turn = self.session.record(f"turn{len(self.session.turns)}", call, given_tokens, answer, assistant(text))
        self.session.finish(call)
        self.saw[turn.id] = [*call.before, *given_tokens, *ids]
        return [*messages, assistant(text)]

    def check(self) -> None:
        """The laws."""
        samples = self.session.samples()
        leaves = [self.session.turns[leaf].id for leaf in self.session.leaves]
        assert [sample.tokens for sample in samples] == [self.saw[leaf] for leaf in leaves]
        trained = [logprob for sample in samples for logprob in sample.logprobs]
        assert sorted(trained) == sorted(-float(n) for n in range(self.count)), "each sampled token exactly once"
        own = {
            lp: t
            for turn in self.session.turns
            for t, lp in zip(turn.answer.token_ids, turn.answer.logprobs, strict=True)
        }
        for sample in samples:
            masked = [token for token, sampled in zip(sample.tokens, sample.mask, strict=True) if sampled]
            assert masked == [own[logprob] for logprob in sample.logprobs]


steps = st.lists(
    st.tuples(
        st.integers(0, 30),  # which conversation goes on
        st.sampled_from(["as it is", "as it is", "altered", "shorter", "saved"]),
        st.sampled_from(["go", "on", "and?"]),
        st.sampled_from(["ab", "abc", "", "x y"]),
        st.booleans(),
        st.sampled_from(["stop", "stop", "length"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_every_sampled_token_is_trained_once_behind_what_the_policy_saw(steps: list[Any]) -> None:
    agent = Agent()
    known: list[list[Message]] = [[]]
    for place, how, question, answer, whole, finish in steps:
        messages = [dict(message) for message in known[place % len(known)]]
        if how == "altered" and messages:
            messages[-1]["content"] += "!"
        if how == "shorter":
            messages = messages[: len(messages) // 2 * 2 - 2] if len(messages) > 2 else []
        if how == "saved":
            agent.session = session_of(json.loads(json.dumps(state_of(agent.session))))
        known.append(agent.ask([*messages, user(question)], answer, whole=whole, finish=finish))
    agent.check()
    if agent.count:
        check_batch(make_episodes_group(agent.session.samples(), group_id=0))


def test_a_plain_conversation_has_the_tokens_of_a_transcript() -> None:
    agent, transcript = Agent(), Transcript(chat_template())
    messages: list[Message] = []
    for question, answer, finish in (("a?", "abc", "stop"), ("b?", "cut off", "length"), ("c?", "x y", "stop")):
        transcript.observe([user(question)])
        messages = agent.ask([*messages, user(question)], answer, whole=False, finish=finish)
        transcript.sampled(agent.session.turns[-1].answer)
    (sample,) = agent.session.samples()
    assert sample.tokens == transcript.tokens
    assert sample.mask == transcript.episode.mask
    assert sample.logprobs == transcript.episode.logprobs


def test_two_continuations_of_one_prefix_train_it_once() -> None:
    agent = Agent()
    start = agent.ask([user("a?")], "abc", whole=False)
    agent.ask([*start, user("left")], "x")
    agent.ask([*start, user("right")], "y")
    first, second = agent.session.samples()
    shared = len(agent.session.tokens(0))
    assert first.tokens[:shared] == second.tokens[:shared]
    assert sum(first.mask[:shared]) == 4, "three letters and the end of the turn"
    assert not any(second.mask[:shared])
    assert any(second.mask)


def test_an_answer_that_the_agent_altered_is_given_and_its_own_stays_trained() -> None:
    agent = Agent()
    start = agent.ask([user("a?")], "abc")
    start[-1]["content"] = "abcd"
    agent.ask([*start, user("b?")], "x")
    first, second = agent.session.samples()
    assert chat_template().decode([t for t, m in zip(first.tokens, first.mask, strict=True) if m]) == "abc<|im_end|>"
    assert chat_template().decode([t for t, m in zip(second.tokens, second.mask, strict=True) if m]) == "x<|im_end|>"
    assert "abcd<|im_end|>" in chat_template().decode(second.tokens)
    assert agent.session.summary()["unsampled_answers"] == 1


def test_of_equal_answers_the_latest_goes_on() -> None:
    agent = Agent()
    agent.ask([user("a?")], "abc", whole=True)
    start = agent.ask([user("a?")], "abc", whole=False)
    agent.ask([*start, user("b?")], "x")
    assert agent.session.turns[2].parent == 1
    agent.check()


def test_other_tools_begin_another_conversation() -> None:
    session = Agent().session
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    call = session.begin([user("a?")], [tool], 0.0)
    session.record("one", call, [1], Completion([2], [0.0], [0], "stop"), assistant("b"))
    messages = [user("a?"), assistant("b"), user("c?")]
    assert session.begin(messages, [tool], 0.0).parent == 0
    other = session.begin(messages, [], 0.0)
    assert (other.parent, other.conversation) == (-1, 1)


def test_rewards_stand_where_they_were_earned_and_add_up_to_the_same_total() -> None:
    agent = Agent()
    start = agent.ask([user("a?")], "abc")
    agent.ask([*start, user("left")], "x")
    agent.ask([*start, user("right")], "y")
    agent.session.reward(0.25, "turn0")
    agent.session.reward(1.0)
    agent.session.reward(-0.5, "turn2")
    first, second = agent.session.samples()
    assert first.total == second.total == 0.75
    assert [value for value in first.earned if value] == [0.25, 1.0]
    assert [value for value in second.earned if value] == [0.5], "its own -0.5 and the session's 1.0"
    with pytest.raises(GatewayError, match="must be a finite number, got nan"):
        agent.session.reward(math.nan)
    with pytest.raises(GatewayError, match="no completion 'turn9'"):
        agent.session.reward(1.0, "turn9")


def test_limits_of_a_session_say_what_they_are() -> None:
    agent = Agent(max_turns=2, max_calls=1)
    call = agent.session.begin([user("a?")], [], 0.0)
    with pytest.raises(GatewayError, match="1 calls under way, max_calls is 1") as raised:
        agent.session.begin([user("a?")], [], 0.0)
    assert (raised.value.status, raised.value.retry) == (429, True)
    agent.session.finish(call)
    agent.ask([user("a?")], "x")
    agent.ask([user("a?")], "y")
    with pytest.raises(GatewayError, match="had 2 answers, max_turns is 2") as raised:
        agent.session.begin([user("a?")], [], 0.0)
    assert (raised.value.status, raised.value.retry) == (400, False)
    with pytest.raises(GatewayError, match="over its deadline of 3600 s"):
        agent.session.begin([user("a?")], [], 100.0)


def test_equal_calls_get_other_seeds_and_another_run_the_same_ones() -> None:
    one, other = Agent().session, Agent().session
    first = [one.next_seed([1, 2]), one.next_seed([1, 2]), one.next_seed([1, 3])]
    assert len(set(first)) == 3
    assert [other.next_seed([1, 3]), other.next_seed([1, 2]), other.next_seed([1, 2])] == [first[2], *first[:2]]


def test_a_question_asked_again_after_a_crash_is_sampled_anew() -> None:
    agent = Agent()
    agent.ask([user("a?")], "abc")
    prompt = agent.session.turns[0].given
    agent.session.next_seed(prompt)  # as the gateway does for each call
    saved = session_of(json.loads(json.dumps(state_of(agent.session))))
    assert saved.next_seed(prompt) == agent.session.next_seed(prompt)
    assert saved.next_seed(prompt) != Agent().session.next_seed(prompt)


# --- on file


def test_supports_and_routes_survive_being_saved() -> None:
    session = Agent().session
    kept = torch.tensor([[5, 6], [7, -1]], dtype=torch.int32)
    routes = torch.arange(12, dtype=torch.int16).reshape(3, 2, 2)
    answer = Completion([5, 7], [-1.0, -2.0], [3, 4], "stop", kept, routes)
    session.record("one", session.begin([user("a?")], [], 0.0), [1, 2], answer, assistant("b"))
    (sample,) = session_of(json.loads(json.dumps(state_of(session)))).samples()
    assert sample.kept is not None
    assert torch.equal(sample.kept, kept)
    assert sample.kept.dtype == torch.int32
    assert sample.routes is not None
    assert torch.equal(sample.routes, routes)
    assert sample.routes.dtype == torch.int16


def test_a_journal_cut_in_the_middle_of_a_line_goes_on_from_the_line_before(tmp_path: Path) -> None:
    agent, journal = Agent(), Journal(str(tmp_path / "new"))
    agent.ask([user("a?")], "x")
    agent.ask([user("b?")], "y")
    for entry in (heading(agent.session), *map(turn_entry, agent.session.turns)):
        journal.write("s", entry)
    (path,) = (tmp_path / "new").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(path.read_bytes()[:-20])
    (session,) = journal.load()
    assert [turn.id for turn in session.turns] == ["turn0"]
    journal.write("s", turn_entry(agent.session.turns[1]))
    (session,) = journal.load()
    assert session.samples() == agent.session.samples()
    journal.forget("s")
    assert journal.load() == []


# --- messages, requests, texts


def test_messages_are_equal_when_they_say_the_same() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    spaced = {**call, "function": {"name": "f", "arguments": '{"a":1}'}, "index": 0}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (developer, one, result), (system, other, same) = (
        plain_messages([first, second, {"role": "tool", "tool_call_id": "c", "content": third}])
        for first, second, third in (
            (
                {"role": "developer", "content": "ab"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                "ab",
            ),
            (
                {"role": "system", "content": parts},
                {"role": "assistant", "refusal": None, "tool_calls": [spaced]},
                parts,
            ),
        )
    )
    assert [message_key(m) for m in (developer, one, result)] == [message_key(m) for m in (system, other, same)]
    assert message_key(user("a")) != message_key(user("b"))
    assert message_key(one) != message_key({**one, "tool_calls": [{**call, "id": "d"}]})


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "at least one message"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "a role of system, developer"),
        ({"messages": [user("a"), assistant("b")]}, "the last message is the assistant's"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text alone"),
        ({"messages": [user("a")], "temperature": 0.0}, "sampled and trained with temperature 1: leave it out"),
        ({"messages": [user("a")], "top_p": 0.9}, "set generator.top_p"),
        ({"messages": [user("a")], "n": 2}, "ask once for each answer"),
        ({"messages": [user("a")], "tool_choice": "required"}, "nothing forces"),
        ({"messages": [user("a")], "top_logprobs": 3}, "top_logprobs '3' cannot be had: leave it out"),
        ({"messages": [user("a")], "min_p": 0.1}, "min_p"),
        ({"messages": [user("a")], "tools": [{"type": "web"}]}, r"tools\[0\] must be of type function"),
        ({"messages": [user("a")], "stop": ["a", ""]}, "none empty"),
        ({"messages": [user("a")], "max_tokens": 0}, "max_tokens must be an integer >= 1, got '0'"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(body: Message, text: str) -> None:
    with pytest.raises(GatewayError, match=text) as raised:
        chat_request(body, GatewayConfig())
    assert raised.value.status == 400


def test_options_that_ask_for_nothing_are_taken_and_others_ignored_where_that_is_wanted() -> None:
    neutral = {"temperature": 1, "frequency_penalty": 0, "n": 1, "user": "me", "tool_choice": "auto", "seed": 3}
    asked = chat_request(
        {"messages": [user("a")], **neutral, "max_tokens": 5, "max_completion_tokens": 4}, GatewayConfig()
    )
    assert (asked.max_tokens, asked.seed) == (4, 3)
    chat_request({"messages": [user("a")], "temperature": 0, "min_p": 1}, GatewayConfig(unsupported="ignore"))


@pytest.mark.parametrize("body", [b"[1]", b"{", b'{"a": "\\ud800"}', b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(GatewayError, match="JSON"):
        read_json(body)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=12), st.lists(st.integers(1, 3), min_size=40, max_size=40))
def test_pieces_are_whole_characters_of_all_tokens(text: str, sizes: list[int]) -> None:
    raw = text.encode()
    cuts = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    token_bytes = [raw[a:b] for a, b in pairwise(cuts) if a < len(raw)]
    pieces = pieces_of(token_bytes)
    assert "".join(piece.text for piece in pieces) == text
    for content in (text, text[: len(text) // 2], text[1:], ""):
        shown = deltas(content, pieces)
        assert "".join(piece.text for piece in shown) == content
        ends = [0, *(piece.end for piece in shown)]
        assert [piece.first for piece in shown] == ends[:-1], "no token is left out or named twice"
        assert ends[-1] == len(token_bytes)


def test_half_a_character_at_the_end_is_replaced() -> None:
    assert pieces_of([b"a", "é".encode()[:1]]) == [Piece("a", 0, 1), Piece("\N{REPLACEMENT CHARACTER}", 1, 2)]


def test_a_stop_ends_the_tokens_where_it_ends_and_the_text_before_it() -> None:
    template = chat_template()
    ids = [*letters(template, "one STOP two"), *template.end_of_turn[:1]]
    kept, routes = torch.zeros(len(ids), 2).int(), torch.zeros(len(ids) + 2, 1, 1).short()
    answer = Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop", kept, routes)
    said = spoken(template, answer, ["never", "STOP"], 3)
    assert said.text == "one "
    assert template.decode(said.answer.token_ids) == "one STOP"
    assert said.answer.kept is not None
    assert said.answer.routes is not None
    assert (len(said.answer.kept), len(said.answer.routes)) == (8, 11)
    assert spoken(template, answer, ["never"], 3).text == "one STOP two"
    assert spoken(template, answer, ["<|im_end|>"], 3).text == "one STOP two"


def test_a_turn_behind_a_stop_has_its_end_given() -> None:
    template = chat_template()
    session = Agent().session
    ids = letters(template, "one STOP")
    answer = Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop")
    call = session.begin([user("a?")], [], 0.0)
    session.add(Turn("one", -1, 0, [], [user("a?")], call.given(template), answer, assistant("one ")))
    then = session.begin([user("a?"), assistant("one "), user("b?")], [], 0.0)
    assert template.decode(then.given(template)).startswith("<|im_end|>\n<|im_start|>user\nb?")


def test_wrong_options_are_named() -> None:
    for config, text in (
        (GatewayConfig(port=70000), r"gateway\.port must be <= 65535, got 70000"),
        (GatewayConfig(temperature=0), r"gateway\.temperature must be a finite number > 0, got 0"),
        (GatewayConfig(unsupported="hope"), "refuse or ignore, got hope"),  # type: ignore[arg-type]
        (
            GatewayConfig(limits=SessionLimits(max_turns=0)),
            r"gateway\.limits\.max_turns must be an integer >= 1, got 0",
        ),
        (GatewayConfig(limits=SessionLimits(max_tokens=600)), "cannot have more than the generators take"),
    ):
        with pytest.raises(ConfigError, match=text):
            config.validate()
    with pytest.raises(ConfigError, match="no limit max_turn; it has max_turns"):
        SessionLimits().changed(max_turn=3)


def test_only_a_client_that_asks_again_behind_a_crash_is_told_what_was_on_record() -> None:
    agent = Agent()
    agent.ask([user("q")], "a")
    assert agent.session.unheard([user("q")], []) is None, "nothing is lost while the server lives"
    session = session_of(state_of(agent.session))
    session.resumed()
    assert session.unheard([user("p")], []) is None
    assert session.unheard([user("q")], [{"type": "function", "function": {"name": "look"}}]) is None
    turn = session.unheard([user("q")], [])
    assert turn is not None
    assert turn.id == "turn0"
    assert session.unheard([user("q")], []) is None, "a second equal call is another one"

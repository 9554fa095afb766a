"""A tokenizer's chat template, asked for the tokens of new messages alone.

What stands behind an answer does not depend on what the answer was. So the template renders a short conversation
that ends in an answer of one known word, with the new messages behind it: what it writes behind that word is the end
of the turn, the new messages and the invitation to answer. No sampled text is rendered or tokenised, and a template
that rewrites earlier answers (Qwen3 drops their thoughts) does not matter.

Text of messages stays text: where it spells a special token, its tokens are those of the letters. Tokens that a
tokenizer adds without calling them special, such as `<think>`, are what it makes of them. Tool schemas are trusted.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge.errors import ConfigError, TranscriptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
"""A chat message in OpenAI's form."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class ChatTemplate:
    """The template of one tokenizer; one for all transcripts of a run.

    `options` are further variables of the template, such as `enable_thinking`. Raises ConfigError where the tokenizer
    has no template, or one that cannot be continued.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self._options = dict(options or {})
        if not tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer {tokenizer.name_or_path} has no chat template, which conversations need; "
                "give a model for chat, or set chat_template in its tokenizer_config.json"
            )
        key = secrets.token_hex(8)  # in no message
        self._answer = f"answer{key}"
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = sorted(special | set(tokenizer.all_special_tokens), key=len, reverse=True)
        self._stand_in = re.compile(f"special{key}x([0-9]+)x")
        self._stand_ins = {token: f"special{key}x{n}x" for n, token in enumerate(self._special)}
        self._spells = re.compile("|".join(map(re.escape, self._special)) or r"(?!)")
        self._anchor = tokenizer.eos_token or tokenizer.bos_token or ""
        self._byte_of = _byte_alphabet(tokenizer)
        try:
            end = self._behind([], (), (), invite=False)
            self.lead = self._lead()
            """What it writes between the invitation and an answer, and a policy has to sample: a space, or ""."""
        except TranscriptError as error:
            raise ConfigError(f"{error}; a transcript needs one that takes a question and an answer") from error
        if end is None:
            raise ConfigError(
                f"the chat template of {tokenizer.name_or_path} leaves out what an assistant says; "
                "a transcript needs one that writes it: set chat_template in tokenizer_config.json"
            )
        self.end_text = end
        self.end_of_turn = self.encode(self.end_text, inside=True)
        """What the template writes behind an answer; a generator must stop at the first of them."""

    # --- tokens

    def whole(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), *, invite: bool, sampled: Iterable[int] = ()
    ) -> list[int]:
        """A conversation from its first token on, with `invite` up to where the assistant answers.

        Messages of these places were `sampled`: special tokens in them are special. Raises TranscriptError where the
        template refuses it.
        """
        return self.encode(self.render(messages, tools, invite=invite, sampled=sampled))

    def behind(self, messages: Sequence[Message], tools: Sequence[Any] = (), calls: Sequence[Any] = ()) -> list[int]:
        """The end of the assistant's turn, which made these tool `calls`; then `messages`; then the next invitation.

        Raises TranscriptError where the template refuses it.
        """
        refusal: TranscriptError | None = None
        plain = called = None
        try:
            plain = self._behind(messages, tools, (), invite=True)
        except TranscriptError as error:  # some do not take a tool's result unless a call precedes it
            refusal = error
        if calls:
            try:
                called = self._behind(messages, tools, calls, invite=True)
            except TranscriptError as error:
                refusal = refusal or error
        # Others look up in the call what the result is called: then the call's own text is in front of the turn's end.
        if called is not None and (plain is None or not called.endswith(plain)):
            start = called.find(self.end_text) if self.end_text else -1
            plain = called[start:] if start >= 0 else plain
        if plain is None:
            raise refusal or TranscriptError(
                f"the chat template cannot be continued by {_roles(messages)} behind an assistant's answer; "
                "give the message that was sampled with its tool_calls, or another chat_template"
            )
        return self.encode(plain, inside=True)

    def following(
        self, messages: Sequence[Message], tools: Sequence[Any], answer: Message, said: Sequence[int], finish: str
    ) -> list[int]:
        """What goes on behind the tokens `said` of an `answer`: its end, `messages`, the next invitation.

        One that ended by itself (`finish` "stop") has sampled its end; one that was cut has not. Raises as `behind`.
        """
        tokens = self.behind(messages, tools, answer.get("tool_calls") or ())
        closed = finish == "stop" and bool(said) and tokens[:1] == list(said[-1:])
        return tokens[1:] if closed else tokens

    def answered(self, said: Sequence[int], finish: str) -> str:
        """The text of an answer's tokens, without the end of its turn."""
        ends = {*self.end_of_turn[:1], *self.tokenizer.all_special_ids}
        closed = finish == "stop" and bool(said) and said[-1] in ends
        return self.decode(said[:-1] if closed else said).removeprefix(self.lead)

    def encode(self, text: str, *, inside: bool = False) -> list[int]:
        """The tokens of rendered text; `inside` a conversation rather than at its start."""
        tokens: list[int] = []
        for n, piece in enumerate(self._stand_in.split(text)):
            if n % 2:
                letters = self._special[int(piece)]
                tokens += self.tokenizer.encode(letters, add_special_tokens=False, split_special_tokens=True)
            elif piece:
                tokens += self._encode(piece, inside=inside or n > 0)
        return tokens

    def _encode(self, text: str, *, inside: bool) -> list[int]:
        plain: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        if not inside or not self._anchor:
            return plain
        # Some tokenizers put a space in front of a text that begins with a word.
        anchor = self.tokenizer.convert_tokens_to_ids(self._anchor)
        anchored: list[int] = self.tokenizer.encode(self._anchor + text, add_special_tokens=False)
        return anchored[1:] if anchored[0] == anchor else plain

    # --- text

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), *, invite: bool, sampled: Iterable[int] = ()
    ) -> str:
        """What the template writes, with stand-ins where the text of a message spells a special token."""
        trusted = set(sampled)
        shown = [_for_template(m if n in trusted else self._guarded(m)) for n, m in enumerate(messages)]
        try:
            text = self.tokenizer.apply_chat_template(
                shown,
                tools=list(tools) or None,
                add_generation_prompt=invite,
                tokenize=False,
                **self._options,
            )
        except Exception as error:  # whatever a template raises
            raise TranscriptError(
                f"the chat template refuses a conversation of {_roles(messages)}: {error}; "
                "give messages that it takes, or another chat_template"
            ) from error
        assert isinstance(text, str)
        return text

    def unguarded(self, text: str) -> str:
        """Rendered text without stand-ins."""
        return self._stand_in.sub(lambda match: self._special[int(match[1])], text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones too."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def bytes_of(self, token: int) -> bytes:
        """What one token adds to a text: half a character, too."""
        added = self.tokenizer.added_tokens_decoder.get(token)
        if added is not None:
            return str(added.content).encode()
        piece = str(self.tokenizer.convert_ids_to_tokens(token))
        if self._byte_of:
            return bytes(self._byte_of[letter] for letter in piece if letter in self._byte_of)
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(match[1])
        return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def _behind(
        self, messages: Sequence[Message], tools: Sequence[Any], calls: Sequence[Any], *, invite: bool
    ) -> str | None:
        """What the template writes behind an answer, or behind the last call's arguments; None where it drops those."""
        answer: Message = {"role": "assistant", "content": self._answer}
        if calls:
            function = {**calls[-1]["function"], "arguments": {"x": self._answer}}
            answer["tool_calls"] = [*calls[:-1], {**calls[-1], "function": function}]
        text = self.render([{"role": "user", "content": "Hi"}, answer, *messages], tools, invite=invite)
        _, found, behind = text.rpartition(self._answer)
        return behind if found else None

    def _lead(self) -> str:
        question: Message = {"role": "user", "content": "Hi"}
        answered = self.render([question, {"role": "assistant", "content": self._answer}, question], invite=False)
        invited = self.render([question], invite=True)
        before = answered.partition(self._answer)[0]
        return before.removeprefix(invited) if before.startswith(invited) else ""

    def _guarded(self, value: Any) -> Any:
        """The same with stand-ins in its texts."""
        if isinstance(value, str):
            return self._spells.sub(lambda match: self._stand_ins[match[0]], value)
        if isinstance(value, Mapping):
            return {key: one if key == "role" else self._guarded(one) for key, one in value.items()}
        return [self._guarded(one) for one in value] if isinstance(value, list | tuple) else value


def _for_template(message: Message) -> Message:
    """As templates expect it: OpenAI's form has arguments as JSON text, and None beside calls."""
    shown = {**message, "content": "" if message.get("content") is None else message["content"]}
    if message.get("tool_calls"):
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _parsed(call["function"].get("arguments", {}))}}
            for call in message["tool_calls"]
        ]
    return shown


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _roles(messages: Sequence[Message]) -> str:
    return "[" + ", ".join(str(message.get("role")) for message in messages) + "]"


def _byte_alphabet(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The letters of a byte-level vocabulary and their bytes; empty for another vocabulary."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters: dict[str, int] = {letter: byte for byte, letter in bytes_to_unicode().items()}
    space = tokenizer.convert_ids_to_tokens(tokenizer.encode("a b", add_special_tokens=False))
    return letters if any("\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}" in str(piece) for piece in space) else {}

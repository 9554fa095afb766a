"""A judge model: reads the prompt and the answer, writes a verdict, of which a number is the reward."""

from __future__ import annotations

import os
import re

import openai

from actors.reward_worker import Sample
from forge.errors import ConfigError, RewardError

QUESTION = (
    "Here are a task and an answer.\n\nTask:\n{prompt}\n\nAnswer:\n{completion}\n\nA right answer: {answer}\n\n"
    "How good is the answer, from 0 to 10? Reply with the number alone."
)


class ChatJudge:
    """Asks any OpenAI-compatible endpoint: a provider, a vLLM server, or the gateway of a run's own generators."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        question: str = QUESTION,
        pattern: str = r"-?\d+(?:\.\d+)?",
        scale: float = 0.1,
        max_tokens: int = 16,
        temperature: float | None = 0.0,
        key_variable: str = "OPENAI_API_KEY",
    ) -> None:
        """question: with {prompt}, {completion} and {answer} of the sample. pattern: the first match in the verdict, or
        its group 1, is the number; scale: its factor. temperature: None leaves it to the endpoint, as the gateway of
        a run insists. key_variable: environment variable that holds the key. Raises ConfigError for a pattern that is
        none.
        """
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"the judge's pattern {pattern!r} is no regular expression: {error}") from error
        self._model, self._question, self._scale, self._max_tokens = model, question, scale, max_tokens
        self._temperature = temperature
        # The pool has the time limit; a retry of a request is within it.
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key=os.environ.get(key_variable, "none"), timeout=None)

    async def score(self, sample: Sample) -> float:
        """The verdict's number times `scale`. Raises RewardError quoting a verdict without one."""
        fields = {"prompt": sample.prompt, "completion": sample.completion, "answer": sample.answer}
        # Not str.format: what a policy writes has braces.
        text = re.sub(r"\{(prompt|completion|answer)\}", lambda match: str(fields[match[1]]), self._question)
        said = await self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": text}],
            temperature=openai.omit if self._temperature is None else self._temperature,
            max_tokens=self._max_tokens,
        )
        verdict = said.choices[0].message.content or ""
        found = self._pattern.search(verdict)
        if found is None:
            raise RewardError(
                f"the judge {self._model} said {verdict[:200]!r}, in which {self._pattern.pattern!r} is not"
            )
        return float(found[1] if found.re.groups else found[0]) * self._scale

    async def close(self) -> None:
        """Ends its connections."""
        await self._client.close()

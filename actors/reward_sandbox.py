"""Rewards for code: runs what the policy wrote in the sandbox, against the tests of its task."""

from __future__ import annotations

import re
import uuid
from typing import Any

from actors.environments.sandbox import Sandbox, SandboxConfig
from actors.reward_worker import Sample
from forge.errors import RewardError

_BLOCK = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)


class CodeTests:
    """The share of a task's tests that the sample's program passes.

    `metadata["tests"]` is a list of {"stdin": text, "stdout": text}, compared without spaces at the ends, or {"code":
    text}, which is run behind the program and passes where it raises nothing; a program that ends early does not pass.
    """

    def __init__(self, **limits: Any) -> None:
        """limits: fields of `SandboxConfig`, for each test. Raises ConfigError."""
        config = SandboxConfig(**limits)
        config.validate()
        self._sandbox = Sandbox(config)

    async def score(self, sample: Sample) -> float:
        """From 0 to 1. Raises RewardError for a task without tests."""
        tests = sample.metadata.get("tests")
        if not tests:
            raise RewardError(f"a task for CodeTests has the metadata {sorted(sample.metadata)}; it needs `tests`")
        program = code_in(sample.completion)
        passed = [await self._passes(program, test) for test in tests]
        return sum(passed) / len(passed)

    async def _passes(self, program: str, test: dict[str, str]) -> bool:
        if "code" in test:
            mark = uuid.uuid4().hex  # that the end was reached; exit status 0 is cheaply had
            result = await self._sandbox.run_python(f"{program}\n\n{test['code']}\nprint('\\n' + {mark!r})\n")
            return result.ok and result.stdout.rstrip().endswith(mark)
        result = await self._sandbox.run_python(program, stdin=test.get("stdin", ""))
        return result.ok and result.stdout.strip() == test["stdout"].strip()


def code_in(text: str) -> str:
    """The last fenced block of an answer; all of it where there is none."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text

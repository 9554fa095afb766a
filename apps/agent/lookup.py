"""An agent for the model `lookup`, as one writes it with the openai package; nothing in it knows of training.

It is asked what stands under a key, may look it up once, and answers. `rows` are its tasks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any

from openai import OpenAI

from apps.grpo.lookups import found, lookup
from apps.grpo.tasks import digits_reward

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "What stands under a key.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    }
]


def agent(task: Mapping[str, Any]) -> float:
    """Answers one question. Its reward: the share of digits in the right place."""
    messages: list[Any] = [{"role": "user", "content": f"{task['key']}?"}]
    with OpenAI() as client:
        while True:
            answer = client.chat.completions.create(
                model="lookup", messages=messages, tools=TOOLS, max_completion_tokens=12
            )
            message = answer.choices[0].message
            if not message.tool_calls or len(messages) > 1:
                return digits_reward(message.content or "", task["value"])
            messages.append(message)
            for call in message.tool_calls:
                assert call.type == "function"
                result = found(asked_for(call.function.arguments), task["key"], task["value"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def asked_for(arguments: str) -> str:
    """The key in a call's arguments; "" where there is none."""
    try:
        return str(json.loads(arguments)["key"])
    except (ValueError, KeyError, TypeError):
        return ""


def rows(num_letters: int = 3, num_digits: int = 4, num_rows: int = 2048, seed: int = 7) -> list[dict[str, Any]]:
    """Rows for data.task."""
    rng = Random(seed)
    pairs = [lookup(rng, num_letters, num_digits) for _ in range(num_rows)]
    return [
        {"prompt": f"{key}?", "metadata": {"id": str(number), "key": key, "value": value}}
        for number, (key, value) in enumerate(pairs)
    ]

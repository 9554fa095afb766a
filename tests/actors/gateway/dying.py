"""Gateways in processes of their own, which die where they are told to; see test_crash.py.

Reads lines of JSON, {"port", "journal", "die", "open"}; serves one each in a fork, and writes a line of JSON once it
listens. Imports once, forks often.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict
from typing import Any

from talking import Talker, chat_template

from actors.gateway.config import GatewayConfig
from actors.gateway.gateway import Gateway


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Dying(Talker):
    """Says "one", then "two"; its second answer is its last where it dies in "generation"."""

    def __init__(self, when: str) -> None:
        super().__init__(lambda text: "two" if "one" in text else "one")
        self.when = when

    async def generate(self, prompts: Any, *arguments: Any, **options: Any) -> Any:
        if self.when == "generation" and "one" in self.template.decode(prompts[0]):
            die()
        return await super().generate(prompts, *arguments, **options)


def dies_behind_record(gateway: Gateway) -> None:
    """Behind the second answer's line, and before anybody is told."""
    journal = gateway._journal
    assert journal is not None
    write, turns = journal.write, 0

    def counted(session: str, entry: Any) -> None:
        nonlocal turns
        write(session, entry)
        turns += "turn" in entry
        if turns == 2:
            die()

    journal.write = counted  # type: ignore[method-assign]


async def serve(order: dict[str, Any]) -> None:
    talker = Dying(order["die"])
    config = GatewayConfig(port=order["port"], journal=order["journal"])
    async with Gateway(talker, chat_template(), None, config) as gateway:
        if order["die"] == "record":
            dies_behind_record(gateway)
        if order["open"]:
            await gateway.open(seed=1)
        ((first, *_),) = gateway.state()
        print(json.dumps({"pid": os.getpid(), "url": gateway.base_url, **first["session"]}), flush=True)
        if order["die"]:
            await asyncio.Event().wait()  # the next line is for another process
        await asyncio.to_thread(sys.stdin.readline)
        await gateway.reward(first["session"]["id"], 1.0)
        samples = await gateway.close(first["session"]["id"])
        rows = [{name: asdict(one)[name] for name in ("tokens", "mask", "versions", "total")} for one in samples]
        print(json.dumps({"samples": rows, "generated": len(talker.asked)}), flush=True)


def main() -> None:
    chat_template()
    print("ready", flush=True)
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            asyncio.run(serve(json.loads(line)))
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()

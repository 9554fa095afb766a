"""The generator's side, inside vLLM's worker: stage a version beside the live one, then flip to it.

A version is asked for at the side door (`door.py`). A thread of that pulls the bytes (`inbox.py`) and loads them into
the shadow model (`shadow.py`), an adapter into a free slot (`adapters.py`), while decoding goes on. The flip exchanges
the two models between two forward passes, so a version that failed half-way never touched the live weights. Where there
is no shadow, by option or because the model keeps weights where an exchange would not find them, the thread pulls only,
and vLLM's weight-transfer interface loads them while decoding is paused (`weightsync.worker.transfer_engine`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from types import FrameType
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from forge.child import die_with_parent
from weightsync.offer import Endpoint, Offer
from weightsync.plan import ModulePart, needed, unpaired_names
from weightsync.worker.adapters import AdapterReceiver
from weightsync.worker.door import WorkerDoor
from weightsync.worker.inbox import Inbox
from weightsync.worker.modules import module_parts
from weightsync.worker.shadow import Shadow

# A worker imports this module before it asks for the engine of this name.
with contextlib.suppress(ValueError):  # registered already
    WeightTransferEngineFactory.register_engine("forge", "weightsync.worker.transfer_engine", "ForgeTransferEngine")

NOTHING = -1


class WeightReceiver(AdapterReceiver):
    """vLLM worker extension (`worker_extension_cls`); `collective_rpc` calls public methods, in the engine's thread.

    Arguments and results are msgpack-plain: text, numbers, lists, dicts.
    """

    # Given by vLLM's worker, which this class is mixed into.
    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: Any
    device: torch.device
    rank: int

    def forge_start(self, shadow: bool) -> str:
        """Builds the shadow model and ties this process's life to the actor's.

        Returns why there is no shadow, or "" where there is one.
        """
        die_with_parent()
        self._forge_staged = NOTHING  # the version that a flip would make live
        self._forge_flipped = NOTHING  # the one that the last flip has made live
        # Held for as long as one of the two threads decides what the shadow is for: a flip, or the next version.
        self._forge_turn = threading.Lock()
        self._forge_inbox: Inbox | None = None
        self._forge_shadow: Shadow | None = None
        if not shadow:
            return "weightsync.shadow is false"
        candidate = Shadow(self.model_runner.model, self.vllm_config)
        if why := candidate.why_not():
            return why
        self._forge_shadow = candidate
        return ""

    def forge_door(self) -> str:
        """Opens the side door, where versions are asked for; returns its address. Once."""
        self._forge_side_door = WorkerDoor(self._forge_stage, self._forge_overtake)
        return self._forge_side_door.address

    def forge_connect(self, endpoint: dict[str, Any], peer: str) -> dict[str, Any]:
        """Reaches for the trainer's ranks. `problem` is what is wrong with their names, or "" when all pair up;
        `needed` is what each worker of this replica reads of each parameter.

        vLLM itself accepts an incomplete update in silence.
        """
        new, model = Endpoint.from_plain(endpoint), self.model_runner.model
        size = self.vllm_config.parallel_config.tensor_parallel_size
        if new.adapter is not None:
            problem = self.forge_adapter_connect(new.adapter, new.layout.plain())
            parts: dict[str, ModulePart] = {}
        else:
            parts = module_parts(model)
            problem = self._forge_unpaired(new, model, parts)
        if problem:
            return {"problem": problem, "needed": []}
        boxes = [needed(new.layout, parts, rank, size) for rank in range(size)]
        if self._forge_inbox is not None:
            self._forge_inbox.close()
        self._forge_inbox = Inbox(new, peer, boxes, self.rank, self.device)
        if self.weight_transfer_engine is not None:
            self.weight_transfer_engine.staged = self._forge_weights
        return {"problem": "", "needed": [{n: [list(r) for r in b] for n, b in worker.items()} for worker in boxes]}

    def _forge_unpaired(self, endpoint: Endpoint, model: torch.nn.Module, parts: dict[str, ModulePart]) -> str:
        tied = self.vllm_config.model_config.hf_config.tie_word_embeddings
        published = {e.name for e in endpoint.layout.entries if not (tied and e.name.startswith("lm_head."))}
        receiver = {n for n, _ in model.named_parameters() if not (tied and n.startswith("lm_head."))}
        receiver = {n.replace(".routed_experts.", ".") for n in receiver}
        missing, unknown = unpaired_names(published, receiver, getattr(model, "packed_modules_mapping", {}), parts)
        if not missing and not unknown:
            return ""
        return (
            f"the published weights do not fit the generator's model: {len(missing)} missing "
            f"({', '.join(missing[:8])}), {len(unknown)} unknown ({', '.join(unknown[:8])}); "
            "trainer and generator must load the same architecture"
        )

    def _forge_overtake(self, request: dict[str, Any]) -> None:
        """In the side door's thread: ends a transfer that nobody waits for any more."""
        if self._forge_inbox is not None:
            self._forge_inbox.interrupt(request["offer"]["epoch"])

    def _forge_stage(self, request: dict[str, Any]) -> float:
        """In the staging thread: brings the version of `request["offer"]` into the shadow, or an adapter into slot
        `request["slot"]`; returns its seconds.
        """
        begin = time.perf_counter()
        inbox, offer, slot = self._forge_inbox, Offer(**request["offer"]), request["slot"]
        assert inbox is not None, "connect comes before stage"
        with self._forge_turn:
            self._forge_staged = NOTHING  # a flip that comes late finds the shadow taken
        inbox.receive(offer)
        if slot is not None:
            self._forge_slots.fill(slot, dict(inbox.weights()))
        elif self._forge_shadow is not None:
            self._forge_shadow.load(inbox.weights())
        if torch.cuda.is_available():
            torch.cuda.synchronize(self.device)  # copies to it may still be under way
        inbox.confirm(offer)
        self._forge_staged = offer.version
        return time.perf_counter() - begin

    def forge_flip(self, version: int) -> dict[str, Any]:
        """Makes the staged `version` live between two forward passes.

        `pause_s` is what it took; `labelled` says that the engine labels tokens with `version` from now on. Where
        this worker is a process of its own (tensor parallelism) it cannot reach the label: the caller has to.
        """
        begin = time.perf_counter()
        with self._forge_turn:
            # One that the actor gave up may land after its version was staged again: then there is nothing left to do.
            if (self._forge_staged, self._forge_flipped) != (NOTHING, version):
                self._forge_check_staged(version)
                self._forge_exchange()
                self._forge_staged, self._forge_flipped = NOTHING, version
        return {"pause_s": time.perf_counter() - begin, "labelled": _label_tokens(str(version))}

    def _forge_exchange(self) -> None:
        assert self._forge_shadow is not None, "without a shadow there is nothing to flip to"
        if next(self._forge_shadow.model.parameters()).is_cuda:
            self._forge_shadow.copy_in_place()
        else:
            self._forge_shadow.exchange()

    def _forge_weights(self, version: int) -> Any:
        """The staged version's weights, for vLLM's weight-transfer interface."""
        self._forge_check_staged(version)
        assert self._forge_inbox is not None
        return self._forge_inbox.weights()

    def _forge_check_staged(self, version: int) -> None:
        staged = self._forge_staged
        if staged != version:
            held = "nothing is" if staged == NOTHING else f"version {staged} is"
            raise RuntimeError(f"version {version} is not staged, {held}")


def _label_tokens(version: str) -> bool:
    """Sets the engine's version label from inside its own call; False where no engine is among the callers.

    With one worker vLLM calls it in the engine's process and thread: flip and label are one step then. As two
    messages a decode step could slip in between them, and its tokens would carry the wrong version.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if caller is not None and hasattr(caller, "set_weight_version"):
            caller.set_weight_version(version)
            return True
        frame = frame.f_back
    return False

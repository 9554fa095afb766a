"""The generator's side, inside vLLM's worker: stage a version beside the live one, then flip by reference.

The worker holds a second, shadow instance of the model. A thread loads the published weights into it (vLLM's
own loader fuses q/k/v and gate/up and repacks for the CPU kernels) while decoding goes on. The flip exchanges
the parameters of the two instances between two forward passes; what was live becomes the next shadow, so a
version that failed half-way never touched the live weights.

Touches vLLM internals, on purpose and here alone: `tests/weightsync/test_vllm_canary.py` fails when they move.
"""

from __future__ import annotations

import copy
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from forge.child import die_with_parent
from forge.segment import Segment, SegmentRef
from weightsync.plan import Layout, unpaired_names, view

# Besides `_parameters`, what vLLM's CPU linear layers keep of a weight: the packed copy's closure.
_PACKED_ATTRIBUTES = ("cpu_linear",)


class WeightReceiver:
    """vLLM worker extension (`worker_extension_cls`); every method is called by `collective_rpc`.

    Arguments and results are msgpack-plain: text, numbers, lists, dicts.
    """

    # Given by vLLM's worker, which this class is mixed into.
    vllm_config: Any
    model_runner: Any

    def forge_start(self) -> None:
        """Builds the shadow model and ties this process's life to the actor's."""
        die_with_parent()
        self._forge_shadow, self._forge_config = self._forge_build_shadow()
        self._forge_stage: dict[str, Any] = {"state": "idle", "version": -1, "error": "", "stage_s": 0.0}

    def forge_connect(self, layout: list[list[Any]], segments: list[dict[str, Any]]) -> str:
        """Maps the publisher's segments; returns what is wrong with its names, or "" when they pair up.

        vLLM itself accepts an incomplete update in silence.
        """
        new = Layout.from_plain(layout)
        tied = self._forge_config.model_config.hf_config.tie_word_embeddings
        published = {e.name for e in new.entries if not (tied and e.name.startswith("lm_head."))}
        receiver = {n for n, _ in self._forge_shadow.named_parameters() if not (tied and n.startswith("lm_head."))}
        packed = getattr(self._forge_shadow, "packed_modules_mapping", {})
        missing, unknown = unpaired_names(published, receiver, packed)
        if missing or unknown:
            return (
                f"the published weights do not fit the generator's model: {len(missing)} missing "
                f"({', '.join(missing[:8])}), {len(unknown)} unknown ({', '.join(unknown[:8])}); "
                "trainer and generator must load the same architecture"
            )
        self._forge_layout = new
        self._forge_segments = [Segment.attach(SegmentRef(**s)) for s in segments]
        return ""

    def forge_stage(self, version: int, buffer: int) -> None:
        """Starts loading `version` from segment `buffer` into the shadow; returns at once."""
        self._forge_stage = {"state": "staging", "version": version, "error": "", "stage_s": 0.0}
        threading.Thread(target=self._forge_load, args=(version, buffer), daemon=True).start()

    def forge_staged(self) -> dict[str, Any]:
        """`state` is "staging", "ready" or "failed" (with `error`)."""
        return dict(self._forge_stage)

    def forge_flip(self, version: int) -> dict[str, Any]:
        """Makes the staged `version` live between two forward passes.

        `pause_s` is what it took; `labelled` says that the engine labels tokens with `version` from now on. Where
        this worker is a process of its own (tensor parallelism) it cannot reach the label: the caller has to.
        """
        begin = time.perf_counter()
        stage = self._forge_stage
        if stage["state"] != "ready" or stage["version"] != version:
            raise RuntimeError(f"version {version} is not staged: {stage}")
        if next(self._forge_shadow.parameters()).is_cuda:
            self._forge_copy_in_place()
        else:
            self._forge_exchange()
        self._forge_stage = {"state": "idle", "version": version, "error": "", "stage_s": 0.0}
        return {"pause_s": time.perf_counter() - begin, "labelled": _label_tokens(str(version))}

    def _forge_exchange(self) -> None:
        """Swaps the two models' parameters by reference; what was live is the next shadow."""
        pairs = zip(self.model_runner.model.named_modules(), self._forge_shadow.named_modules(), strict=True)
        for (name, live), (shadow_name, shadow) in pairs:
            assert (name, type(live)) == (shadow_name, type(shadow)), (name, shadow_name)
            live._parameters, shadow._parameters = shadow._parameters, live._parameters
            for attribute in _PACKED_ATTRIBUTES:
                if attribute in live.__dict__:
                    ours, theirs = live.__dict__[attribute], shadow.__dict__[attribute]
                    live.__dict__[attribute], shadow.__dict__[attribute] = theirs, ours

    def _forge_copy_in_place(self) -> None:
        """On GPUs captured graphs hold the addresses of the live parameters: copy on the device, keep the places."""
        live, shadow = self.model_runner.model.named_parameters(), self._forge_shadow.named_parameters()
        with torch.no_grad():
            for (name, ours), (shadow_name, theirs) in zip(live, shadow, strict=True):
                assert name == shadow_name, (name, shadow_name)
                ours.copy_(theirs)
        torch.cuda.synchronize()

    def _forge_build_shadow(self) -> tuple[torch.nn.Module, Any]:
        import vllm.model_executor.layers.rotary_embedding as rotary
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model_loader

        config = copy.copy(self.vllm_config)
        config.compilation_config = copy.copy(config.compilation_config)
        # Attention layers register by name here; a second model needs its own register.
        config.compilation_config.static_forward_context = {}
        # Rotary modules are cached globally: a shared one would go to the meta device under the live model.
        cached = dict(rotary._ROPE_DICT)
        rotary._ROPE_DICT.clear()
        try:
            with set_current_vllm_config(config):
                loader = get_model_loader(config.load_config)
                shadow = loader.load_model(vllm_config=config, model_config=config.model_config)
        finally:
            rotary._ROPE_DICT.clear()
            rotary._ROPE_DICT.update(cached)
        return shadow, config

    def _forge_load(self, version: int, buffer: int) -> None:
        begin = time.perf_counter()
        try:
            self._forge_load_shadow(self._forge_segments[buffer].buffer)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # copies to the device may still be under way
            state = {"state": "ready", "version": version, "error": ""}
        except BaseException:
            state = {"state": "failed", "version": version, "error": traceback.format_exc()}
        self._forge_stage = {**state, "stage_s": time.perf_counter() - begin}

    def _forge_load_shadow(self, buffer: torch.Tensor) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        shadow: Any = self._forge_shadow
        with set_current_vllm_config(self._forge_config), torch.no_grad():
            initialize_layerwise_reload(shadow)
            try:
                shadow.load_weights(self._forge_weights(buffer))
            finally:
                # Whatever happened, the shadow ends as a complete model and can be loaded again.
                finalize_layerwise_reload(shadow, self._forge_config.model_config)
            for module in shadow.modules():
                # A tied head takes its weight from the embedding and is skipped by the reload: its packed
                # copy would stay the old one.
                if isinstance(module, ParallelLMHead):
                    quant_method: Any = module.quant_method
                    quant_method.process_weights_after_loading(module)

    def _forge_weights(self, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for entry in self._forge_layout.entries:
            yield entry.name, view(buffer, entry)


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

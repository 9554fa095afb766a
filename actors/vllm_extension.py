"""What runs inside vLLM's workers: the receiver of weights, and on request the recorder of routed experts.

vLLM returns the experts that a mixture of experts has chosen, but by the newer of its two model runners only, which
needs a GPU, and refuses the option elsewhere. The older one, which serves CPUs, gets the same recorder here: vLLM's
own, fed around each step. What comes out, `CompletionOutput.routed_experts`, is the same.

    step:  begin_step(requests) -> forward pass, each router tells its choice -> sample -> rows of each request

Touches vLLM internals: `tests/actors/test_router_replay.py` fails when they move.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.v1.core.sched.scheduler import Scheduler

from weightsync.worker.receiver import WeightReceiver


class WorkerExtension(WeightReceiver):
    """vLLM worker extension (`worker_extension_cls`)."""

    def forge_record_routes(self) -> None:
        """Has a model runner that cannot do it by itself return the experts of every token from now on."""
        if not hasattr(self.model_runner, "aux_output_connector"):
            _Recorder(self.model_runner, self.vllm_config).attach()


class RoutingScheduler(Scheduler):
    """Tells the recorders of its requests, and hands out what they return, as vLLM's own option makes it do."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.aux_output_connector = AuxOutputSchedulerConnector()


class _Recorder:
    """Stands around the two halves of a model runner's step."""

    def __init__(self, runner: Any, vllm_config: Any) -> None:
        self._runner = runner
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        self._connector = get_aux_output_connector(runner.model, vllm_config, runner.kv_cache_config)
        self._pending: Any = None

    def attach(self) -> None:
        self._runner.execute_model, self._runner.sample_tokens = self.execute_model, self.sample_tokens

    def execute_model(self, scheduler_output: Any, *arguments: Any, **keywords: Any) -> Any:
        self._connector.begin_step(scheduler_output.aux_output_connector_metadata)
        result = self._execute(scheduler_output, *arguments, **keywords)
        if scheduler_output.total_num_scheduled_tokens:
            self._pending = self._connector.prepare_output(self._batch(scheduler_output))
        return result

    def sample_tokens(self, *arguments: Any, **keywords: Any) -> Any:
        output = self._sample(*arguments, **keywords)
        if self._pending is not None and output is not None:
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            self._pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = self._pending.process_output()
            self._pending = None
        return output

    def _batch(self, scheduler_output: Any) -> Any:
        """The step as the recorder reads it: its requests, and the tokens of each, end to end."""
        batch = self._runner.input_batch
        counts = [scheduler_output.num_scheduled_tokens[name] for name in batch.req_ids]
        return SimpleNamespace(
            req_ids=list(batch.req_ids),
            query_start_loc_np=np.concatenate([[0], np.cumsum(counts)]),
            num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(counts)].copy(),
        )

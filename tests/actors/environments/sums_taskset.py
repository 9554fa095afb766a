"""A taskset of the real verifiers, imported by its own interpreter: sums, and a word of praise after each answer."""

import verifiers.v1 as vf  # type: ignore[import-not-found]

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.answer))


class SumsTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):  # type: ignore[no-untyped-def]
        for n in range(5):
            yield SumTask(SumData(prompt=f"{n}+{n}", answer=2 * n), self.config.task)

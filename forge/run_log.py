"""What a run says while it runs and when it ends.

    log = RunLog(cfg.run, config_yaml, cfg.trainer.steps, name="smollm2")   # before any process starts
    log.note("starting the generators")
    log.step({**meter.lap(), **result.metrics, "step": 1, ...}, episodes=sample)
    log.close()
    log.print_table()

None of these waits for a disk or a terminal, `close` and `print_table` excepted: rows go to the thread of
forge/run_folder.py, what is shown goes to a thread of its own, which drops updates when the terminal is slow.
"""

from __future__ import annotations

import asyncio
import queue
import textwrap
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import yaml
from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from forge import run_facts, trackers
from forge.checkpoints import Checkpoint, Checkpoints
from forge.collector import Collector
from forge.errors import ConfigError, RunFolderError
from forge.metrics import NONFINITE, Number, Row, make_row, read_rows
from forge.report.runs import leaves
from forge.run_folder import EpisodeRecord, RunFolder, check_dir
from forge.trace import Trace
from forge.trackers import Place, Trackers

T = TypeVar("T")
_LINE_EVERY_S = 2.0
_RECENT_STEPS = 20
_QUEUED_UPDATES = 64
CHECKPOINTS = "checkpoints"


@dataclass
class RunConfig:
    """Where a run is written and what it shows."""

    dir: str | None = None
    """Folder of this run; must be empty or absent. Null makes runs/<preset or model>-<date>-<time>."""
    episodes_per_step: int = 2
    """Decoded episodes written to episodes.jsonl a step; 0 writes none."""
    progress: bool = True
    """Show progress: a live bar on a terminal, a line every two seconds at most elsewhere."""
    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    trace: bool = False
    """Write trace.json into the run folder, for Perfetto: what the train loop and every actor did when, on one clock;
    in apps/worlds the turns of environments, too."""
    wandb: str = ""
    """Project of Weights & Biases that rows go to as well; offline unless WANDB_API_KEY is set. Needs `wandb`."""
    mlflow: str = ""
    """Tracking URI of MLflow, or a folder, that rows go to as well. Needs `mlflow`."""
    checkpoint: bool = True
    """Write the final model to checkpoint/ in the run folder, in Hugging Face format."""
    resume: str | None = None
    """Folder of a run to go on with, from its last checkpoint; --resume DIR also takes its configuration."""
    checkpoint_every: int = 20
    """Steps between two checkpoints to resume from; 0 writes none. They are written while training goes on."""
    keep_checkpoints: int = 1
    """Checkpoints to resume from that are kept."""


def check_run(cfg: RunConfig) -> None:
    """Raises ConfigError when the run cannot start like this; makes nothing."""
    if cfg.episodes_per_step < 0:
        raise ConfigError(f"run.episodes_per_step must be >= 0, got {cfg.episodes_per_step}; use 0 for none")
    if cfg.checkpoint_every < 0:
        raise ConfigError(f"run.checkpoint_every must be >= 0, got {cfg.checkpoint_every}; use 0 for none")
    if cfg.keep_checkpoints < 1:
        raise ConfigError(f"run.keep_checkpoints must be >= 1, got {cfg.keep_checkpoints}; 1 keeps the newest")
    trackers.check("run.wandb", "wandb", cfg.wandb)
    trackers.check("run.mlflow", "mlflow", cfg.mlflow)
    if cfg.resume is not None:
        if not (Path(cfg.resume) / "config.yaml").is_file():
            raise ConfigError(f"run.resume {cfg.resume} holds no config.yaml; give the folder of a run")
    elif cfg.dir is not None:
        check_dir(cfg.dir)


class RunLog:
    """All that a run writes and shows, behind one call a step.

    `live` None shows the bar on a terminal and plain lines elsewhere; False gives plain lines always, as
    a debugger needs them. Plain lines begin with `label`. Raises ConfigError or RunFolderError as `RunFolder` does.
    """

    def __init__(
        self,
        cfg: RunConfig,
        config_yaml: str,
        total_steps: int,
        *,
        name: str = "run",
        live: bool | None = None,
        label: str = "",
        console: Console | None = None,
    ) -> None:
        check_run(cfg)
        self._cfg, self._total = cfg, total_steps
        self._console = console or Console()
        self.resumed: Checkpoint | None = None
        """What a resumed run goes on from; None: from the start."""
        self.start = 0
        """The step, and policy version, that the run goes on from."""
        last_step = None
        if cfg.resume is not None:
            self.resumed = Checkpoints(Path(cfg.resume).absolute() / CHECKPOINTS).latest()
            self.start = last_step = self.resumed.version if self.resumed else 0
        dir = cfg.resume or cfg.dir
        self.folder = RunFolder(dir, name, config_yaml, tensorboard=cfg.tensorboard, last_step=last_step)
        run_facts.note_start(self.folder.absolute)
        self.checkpoints = Checkpoints(self.folder.absolute / CHECKPOINTS, cfg.keep_checkpoints)
        number = f"-{self.start}" if self.start else ""
        self.trace = Trace(self.folder.absolute / f"trace{number}.json" if cfg.trace else None)
        """What took how long; of a resumed run a file of its own."""
        self._collector = Collector(self.trace)
        self._terminal: Terminal | None = None
        if cfg.progress:
            live = self._console.is_terminal if live is None else live
            self._terminal = Terminal(self._console, total_steps, live=live, label=label)
        place = Place(self.folder.absolute, leaves(yaml.safe_load(config_yaml)), name)
        self._trackers = Trackers(place, wandb=cfg.wandb, mlflow=cfg.mlflow, told=self.note)
        self.note(f"run folder {self.folder.path}" + (f", going on behind step {last_step}" if cfg.resume else ""))

    def __enter__(self) -> RunLog:
        """From here on, what actors of this process's clusters measure of themselves comes here."""
        Collector.current = Collector.current or self._collector
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if Collector.current is self._collector:
            Collector.current = None
        ended_with = run_facts.NO_ERROR if error is None else _ending(error)
        run_facts.note(self.folder.absolute, ended_with=ended_with, ended=time.time())
        if error is None:
            self.close()
            return
        self._trackers.close(failed=True, seconds=5.0)
        # What went wrong first is what the user has to see; a disk that fails as well only adds to it.
        with suppress(RunFolderError):
            self.close()

    @property
    def checkpoint(self) -> Path | None:
        """Where the final model goes; None when the config asks for none."""
        return self.folder.checkpoint if self._cfg.checkpoint else None

    @property
    def elapsed_s(self) -> float:
        """Wall time that a resumed run had taken up to where it goes on, in seconds."""
        rows = read_rows(self.folder.metrics_path)
        return float(rows[-1]["time_s"] or 0.0) if rows else 0.0

    def note(self, text: str) -> None:
        """Shows one line about what the run does now, such as a start that takes minutes."""
        if self._terminal is not None:
            self._terminal.note(text)

    async def patiently(self, wait: Awaitable[T], why: Callable[[], Awaitable[str]], patience_s: float = 15.0) -> T:
        """The result of `wait`. Each time that it has dragged on for another `patience_s` seconds, shows `why()`."""
        call = asyncio.ensure_future(wait)
        try:
            while not (await asyncio.wait([call], timeout=patience_s))[0]:
                self.note(await why())
            return await call
        finally:
            call.cancel()

    def step(self, values: Mapping[str, Any], episodes: Sequence[EpisodeRecord] = ()) -> Row:
        """Records one step; returns the row as it is written. Never waits.

        `values` as for `make_row`; the first `episodes_per_step` of `episodes` are kept. Raises
        SchemaError for a wrong row, RunFolderError when an earlier write failed.
        """
        lost = {"extra/tracker_rows_dropped": self._trackers.dropped} if self._trackers.dropped else {}
        row = make_row({**values, **self._collector.lap(), **lost})
        self.folder.write(row, episodes[: self._cfg.episodes_per_step])
        self._trackers.log(row)
        if self._terminal is not None:
            self._terminal.step(row)
        return row

    def evaluation(self, row: Row) -> None:
        """Records the figures of one evaluation, see `RunFolder.write_evaluation`. Never waits."""
        self.folder.write_evaluation(row)
        self._trackers.log(row)

    def close(self) -> None:
        """Restores the terminal and closes the files; a second call does nothing.

        Raises RunFolderError when rows could not be written and no earlier call said so.
        """
        self._trackers.close()
        if self._terminal is not None:
            self._terminal.close()
        self.trace.close()
        self.folder.close()

    def print_table(self, peak_memory: Mapping[str, int] | None = None, *more: RenderableType) -> None:
        """Prints the last table, and `more` below it; call it after `close`. `peak_memory` is bytes by role."""
        table = final_table(read_rows(self.folder.metrics_path), self._total, peak_memory)
        if peak_memory:
            run_facts.note(self.folder.absolute, peak_memory=dict(peak_memory))
        # rich answers a reader that went away (`| head`) with SystemExit, which would hide the exit code.
        with suppress(BrokenPipeError, SystemExit):
            self._console.print(table, *more, sep="\n")
            self._console.print(f"run folder {self.folder.path}", highlight=False, markup=False, soft_wrap=True)


def _ending(error: BaseException) -> str:
    """The first cause in one line; a task group's error holds those of its tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, (asyncio.CancelledError, KeyboardInterrupt)):
        return "a stop before its last step"
    text = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Terminal:
    """Shows progress from a thread of its own, so that a stopped terminal or a full pipe stops nobody."""

    def __init__(
        self,
        console: Console,
        total_steps: int,
        *,
        live: bool,
        label: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label = label
        self._console, self._total, self._clock = console, total_steps, clock
        self._bar = _Bar(console, total_steps) if live else None
        self._recent: deque[tuple[Number, Number]] = deque(maxlen=_RECENT_STEPS)
        self._next_line_s = clock()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="terminal", daemon=True)
        self._thread.start()

    def note(self, text: str) -> None:
        """Shows `text` in lines of its own, above the bar where there is one."""
        self._submit(lambda: self._print(text))

    def step(self, row: Row) -> None:
        """Shows a row; without a bar the last one always and others every two seconds at most."""
        step, bar = row["step"] or 0, self._bar
        status = status_line(row, self._eta_s(step, row["time_s"] or 0))
        if bar is not None:
            self._submit(lambda: bar.show(status, int(step)))
        elif self._clock() >= self._next_line_s or step >= self._total:
            self._next_line_s = self._clock() + _LINE_EVERY_S
            self._submit(lambda: self._print(f"step {step}/{self._total}  {status}"))

    def close(self) -> None:
        """Shows what is queued and gives the terminal back; gives up on one that is stopped."""
        self._queue.put(None)
        self._thread.join(2.0)

    def _eta_s(self, step: Number, time_s: Number) -> float:
        first_step, first_s = self._recent[0] if self._recent else (step - 1, 0.0)
        self._recent.append((step, time_s))
        return (time_s - first_s) / max(1, step - first_step) * max(0, self._total - step)

    def _submit(self, action: Callable[[], None]) -> None:
        if self._queue.qsize() < _QUEUED_UPDATES:
            self._queue.put(action)

    def _print(self, text: str) -> None:
        text = self._label + text
        if self._console.is_terminal:  # elsewhere a line is a line, for grep
            options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
            text = "\n".join(
                textwrap.fill(line, self._console.width, subsequent_indent="  ", **options)
                for line in text.splitlines()
            )
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _work(self) -> None:
        # Nobody reads any more (SystemExit is rich's word for a broken pipe): training goes on unseen.
        with suppress(OSError, SystemExit):
            if self._bar is not None:
                self._bar.start()
            while (action := self._queue.get()) is not None:
                action()
            if self._bar is not None:
                self._bar.stop()


class _Bar(Progress):
    """A bar with one line of figures below it."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._status = ""
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TimeElapsedColumn())
        super().__init__(*columns, console=console, refresh_per_second=2, expand=True)
        self._task = self.add_task("step", total=total_steps)

    def show(self, status: str, step: int | None = None) -> None:
        self._status = status
        self.update(self._task, completed=step, refresh=True)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self._status, no_wrap=True, overflow="ellipsis")


def status_line(row: Row, eta_s: float) -> str:
    """The figures of one row in one line below 80 columns; staleness as mean/max, then the bound.

    A run without a replay, on data that are there, has its loss instead.
    """
    if row["staleness/bound"] is None:
        pace = (row["tokens/trained"] or 0) / row["time/step_s"] if row["time/step_s"] else None
        figures = (f"loss {_text(row['loss/policy'], '.4f')}", f"{_text(pace, ',.0f')} tok/s")
        return "  ".join((*figures, f"idle {_text(row['trainer/idle_share'], '.0%')}", f"ETA {_duration(eta_s)}"))
    return "  ".join(
        (
            f"reward {_text(row['reward/mean'], '.3f')}",
            f"staleness {_text(row['staleness/mean'], '.1f')}/{_text(row['staleness/max'])}"
            f" bound {_text(row['staleness/bound'])}",
            f"{_text(row['generator/tokens_per_s'], ',.0f')} tok/s",
            f"idle {_text(row['trainer/idle_share'], '.0%')}",
            f"ETA {_duration(eta_s)}",
        )
    )


def final_table(
    rows: Sequence[Row], total_steps: int | None = None, peak_memory: Mapping[str, int] | None = None
) -> Table:
    """The table that ends a run: two columns, below 80 characters, one fact a line.

    `rows` as read by `read_rows`; a figure that no row has is shown as "-". `peak_memory` is bytes by role.
    """
    table = Table(box=box.ROUNDED, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in _facts(rows, total_steps):
        table.add_row(name, value)
    if peak_memory:
        width = max(map(len, peak_memory))
        memory = (f"{role:{width}} {size / 2**30:8.2f} GiB" for role, size in peak_memory.items())
        table.add_row("peak memory", "\n".join(memory))
    return table


def _facts(rows: Sequence[Row], total_steps: int | None) -> Iterable[tuple[str, str]]:
    last = rows[-1] if rows else {}
    wall_s = last.get("time_s") or 0.0
    of_total = "" if total_steps is None else f" of {total_steps:,}"
    yield "steps", f"{len(rows):,}{of_total}"
    yield "episodes", _count(rows, "episodes/trained")
    offline = bool(rows) and last.get("staleness/bound") is None
    yield from _data_facts(rows, wall_s) if offline else _rollout_facts(rows, wall_s)
    yield "wall time", _duration(wall_s)
    if nonfinite := sum(_values(rows, NONFINITE)):
        yield "NaN or infinite", f"{nonfinite:,} values, written as null"


def _rollout_facts(rows: Sequence[Row], wall_s: float) -> Iterable[tuple[str, str]]:
    last = rows[-1] if rows else {}
    yield "reward", _rise(_values(rows, "reward/mean"))
    yield "tokens", f"{_count(rows, 'tokens/generated')} generated, {_count(rows, 'tokens/trained')} trained"
    yield "tokens/s", _text(_over(rows, "tokens/generated", wall_s), ",.0f")
    yield "trainer idle share", _text(_over(rows, "time/wait_batch_s", wall_s), ".1%")
    yield "staleness", _staleness(rows, last.get("staleness/bound"))
    dropped, wasted = _count(rows, "episodes/dropped"), _count(rows, "tokens/wasted")
    yield "dropped", f"{dropped} episodes, {wasted} tokens"
    yield "publish stall", _mean_max_ms(_values(rows, "time/publish_stall_s"))
    yield "generator pause", _mean_max_ms([v for v in _values(rows, "generator/pause_s") if v > 0])


def _data_facts(rows: Sequence[Row], wall_s: float) -> Iterable[tuple[str, str]]:
    """Of a run on data that are there, without a replay."""
    yield "loss", _rise(_values(rows, "loss/policy"))
    yield "tokens", f"{_count(rows, 'tokens/trained')} trained"
    yield "tokens/s", _text(_over(rows, "tokens/trained", wall_s), ",.0f")
    yield "trainer idle share", _text(_over(rows, "time/wait_batch_s", wall_s), ".1%")


def _values(rows: Sequence[Row], key: str) -> list[Number]:
    return [value for row in rows if (value := row.get(key)) is not None]


def _count(rows: Sequence[Row], key: str) -> str:
    values = _values(rows, key)
    return _text(sum(values) if values else None, ",")


def _over(rows: Sequence[Row], key: str, wall_s: float) -> float | None:
    return sum(_values(rows, key)) / wall_s if wall_s > 0 else None


def _rise(rewards: Sequence[Number]) -> str:
    if not rewards:
        return "-"
    span = max(1, min(5, len(rewards) // 2))
    first, last = sum(rewards[:span]) / span, sum(rewards[-span:]) / span
    steps = "step" if span == 1 else f"{span} steps"
    return f"{first:.3f} -> {last:.3f}  ({last - first:+.3f}; first and last {steps})"


def _staleness(rows: Sequence[Row], bound: Number | None) -> str:
    means, most = _values(rows, "staleness/mean"), _values(rows, "staleness/max")
    mean = sum(means) / len(means) if means else None
    return f"mean {_text(mean, '.2f')}, max {_text(max(most, default=None))}, bound {_text(bound)}"


def _mean_max_ms(seconds: Sequence[Number]) -> str:
    if not seconds:
        return "-"
    return f"mean {sum(seconds) / len(seconds) * 1e3:,.1f} ms, max {max(seconds) * 1e3:,.1f} ms"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _text(value: Number | None, spec: str = "g") -> str:
    return "-" if value is None else format(value, spec)

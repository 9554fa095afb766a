"""Rows without a length or an index, such as a data set that is streamed from a hub: pass after pass, resumable."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from forge.errors import ConfigError

Row = Mapping[str, Any]


class Passes(IterableDataset[Any]):
    """`make(epoch, number, row)` of every row, in the rows' own order, pass after pass. It is its own iterator.

    `state_dict()` is where it stands. Rows that have `state_dict` and `load_state_dict` (those of Hugging Face
    `datasets` do) go on from there at once; others are read again up to there. Rows with `set_epoch` are told of each
    pass, and may come in another order then. Raises ConfigError when a pass has no row, or when the rows are used up by
    one pass, as a generator is.
    """

    def __init__(self, rows: Any, make: Callable[[int, int, Row], Any]) -> None:
        if iter(rows) is rows:
            raise ConfigError(
                f"rows that can be read once only ({type(rows).__name__}) end after one epoch and cannot be resumed; "
                "return an object whose __iter__ begins anew, such as a datasets.IterableDataset"
            )
        self._rows, self._make = rows, make
        self._epoch = self._position = 0
        self._pass: Iterator[Row] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        row = next(self._current(), None)
        if row is None:
            if self._position == 0:
                raise ConfigError("the data set has 0 rows; a stream of prompts needs at least one")
            self._epoch, self._position, self._pass = self._epoch + 1, 0, None
            return next(self)
        made = self._make(self._epoch, self._position, row)
        self._position += 1
        return made

    def _current(self) -> Iterator[Row]:
        if self._pass is None:
            if hasattr(self._rows, "set_epoch"):
                self._rows.set_epoch(self._epoch)
            self._pass = iter(self._rows)
        return self._pass

    def state_dict(self) -> dict[str, Any]:
        own = {"epoch": self._epoch, "position": self._position}
        return {**own, "rows": self._rows.state_dict()} if self._is_stateful else own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._position, self._pass = state["epoch"], state["position"], None
        if self._is_stateful:
            self._rows.load_state_dict(state["rows"])
        else:
            self._pass = itertools.islice(self._current(), self._position, None)

    @property
    def _is_stateful(self) -> bool:
        return hasattr(self._rows, "state_dict") and hasattr(self._rows, "load_state_dict")

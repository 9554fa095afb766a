"""Laws of recorded supports: whole or not there at all, and fitted to each other without inventing any."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from forge.batch import check_batch, make_group
from forge.errors import SchemaError
from forge.supports import fitted, joined, whole_supports

OUT = -math.inf


def rows(*values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_support_is_recorded_when_the_entry_behind_it_lies_outside() -> None:
    ids = np.array([[5, 6, 7], [5, 6, 7], [5, 6, 7]])
    logprobs = np.array([[-0.1, -2.0, OUT], [0.0, OUT, OUT], [-1.0, -1.1, -1.2]])
    kept = whole_supports(ids, logprobs)
    assert kept.dtype == torch.int32
    assert kept.tolist() == [[5, 6], [5, -1], [-1, -1]], "the last has a third token, and perhaps a fourth"


def test_fitting_pads_what_is_narrow_and_leaves_out_what_is_too_large() -> None:
    kept = rows([1, -1, -1], [1, 2, -1], [1, 2, 3], [-1, -1, -1])
    assert fitted(kept, 4, 3).tolist() == kept.tolist()
    assert fitted(kept, 4, 4).tolist() == [[1, -1, -1, -1], [1, 2, -1, -1], [1, 2, 3, -1], [-1] * 4]
    assert fitted(kept, 4, 2).tolist() == [[1, -1], [1, 2], [-1, -1], [-1, -1]]
    assert fitted(None, 2, 2).tolist() == [[-1, -1], [-1, -1]]


def test_parts_are_joined_in_the_widest_and_without_any_there_is_none() -> None:
    assert joined([(None, 2), (None, 0)]) is None
    both = joined([(None, 1), (rows([4]), 1), (rows([5, 6]), 1)])
    assert both is not None
    assert both.tolist() == [[-1, -1], [4, -1], [5, 6]]


def test_a_group_holds_supports_where_its_completions_have_some() -> None:
    td = make_group(
        [9],
        [[1, 2], [3], []],
        [[-1.0] * 2, [-1.0], []],
        [[0] * 2, [0], []],
        group_id=0,
        kept=[rows([1, 4], [2, -1]), None, None],
    )
    check_batch(td)
    nothing = [-1, -1]
    assert td["kept_tokens"].tolist() == [[nothing, [1, 4], [2, -1]], [nothing] * 3, [nothing] * 3]
    td = make_group([9], [[1]], [[-1.0]], [[0]], group_id=0, kept=[None])
    assert "kept_tokens" not in td.keys()  # noqa: SIM118


def test_supports_that_break_the_schema_are_refused() -> None:
    def made(kept: torch.Tensor) -> None:
        check_batch(make_group([9], [[1, 2]], [[-1.0] * 2], [[0] * 2], group_id=0, kept=[kept]))

    made(rows([4, 1], [2, 5]))
    with pytest.raises(SchemaError, match=r"kept has lengths \[1\], completions \[2\]"):
        made(rows([1, 4]))
    with pytest.raises(SchemaError, match=r"kept_tokens of a trained token 2 are \[4, 5\], without it"):
        made(rows([1, 4], [4, 5]))
    td = make_group([9], [[1]], [[-1.0]], [[0]], group_id=0, kept=[rows([1])])
    td["kept_tokens"] = td["kept_tokens"][..., 0]
    with pytest.raises(SchemaError, match=r"kept_tokens has shape \[1, 2\], expected \[1, 2, 'K'\]"):
        check_batch(td)
    td["kept_tokens"] = torch.zeros((1, 2, 1), dtype=torch.int64)
    with pytest.raises(SchemaError, match=r"kept_tokens has dtype torch\.int64, expected torch\.int32"):
        check_batch(td)

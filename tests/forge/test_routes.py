"""Laws of recorded routes: they run along prompt and completion, and packing keeps them outside of the mask, too."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from forge.batch import check_batch, collate, make_group
from forge.errors import SchemaError
from forge.packing import flatten, pack, pad
from forge.routes import continued


def routes(count: int, first: int = 0) -> torch.Tensor:
    """`[count, 2, 2]`: two layers that choose two experts each, all different."""
    return torch.arange(4 * first, 4 * (first + count)).reshape(count, 2, 2).short()


def group(prompt: int = 2, *, group_id: int = 0) -> TensorDict:
    completions = [[5, 6, 7], [8]]
    return make_group(
        list(range(1, prompt + 1)),
        completions,
        [[-1.0] * len(c) for c in completions],
        [[0] * len(c) for c in completions],
        group_id=group_id,
        routes=[routes(prompt + 2), routes(prompt, first=50)],
    )


def test_what_was_sampled_first_was_sampled_by_the_first_routes() -> None:
    assert continued(None, None) is None
    again = routes(5, first=20)
    for first, later, expected in (
        (routes(3), None, routes(3)),
        (None, again, again),
        (routes(3), again, torch.cat([routes(3), again[3:]])),
    ):
        found = continued(first, later)
        assert found is not None
        assert torch.equal(found, expected)


def test_a_group_holds_routes_of_prompts_too_and_none_of_the_last_token() -> None:
    td = group()
    check_batch(td)
    assert td["routed_experts"].shape == (2, 5, 2, 2)
    assert td["routed_experts"].dtype == torch.int16
    assert torch.equal(td["routed_experts"][0, :4], routes(4))
    assert torch.equal(td["routed_experts"][1, :2], routes(2, first=50))
    assert bool((td["routed_experts"][0, 4:] == -1).all())
    assert bool((td["routed_experts"][1, 2:] == -1).all())


def test_only_some_completions_may_have_routes() -> None:
    td = make_group([9], [[1], [2]], [[-1.0]] * 2, [[0]] * 2, group_id=0, routes=[None, routes(1)])
    check_batch(td)
    assert td["routed_experts"][:, 0].flatten(1).tolist() == [[-1] * 4, [0, 1, 2, 3]]
    td = make_group([9], [[1]], [[-1.0]], [[0]], group_id=0, routes=[None])
    assert "routed_experts" not in td.keys()  # noqa: SIM118


def test_packing_keeps_the_routes_of_prompts_and_comes_back() -> None:
    groups = [group(2, group_id=0), group(3, group_id=1)]
    flat = [flatten(td) for td in groups]
    assert torch.equal(flat[0]["routed_experts"][:4], routes(4))
    order = [3, 0, 1, 2]
    packed = pack(flat, [order[:2], order[2:]])
    back = pad([packed])
    assert torch.equal(back["routed_experts"], collate(groups)["routed_experts"][order])


def test_routes_that_break_the_schema_are_refused() -> None:
    def made(*of_episodes: torch.Tensor) -> None:
        many = len(of_episodes)
        check_batch(make_group([9], [[1]] * many, [[-1.0]] * many, [[0]] * many, group_id=0, routes=of_episodes))

    made(routes(2), routes(1))
    with pytest.raises(SchemaError, match=r"routes of \[3\] tokens .* the episodes have \[2\] tokens"):
        made(routes(3))
    with pytest.raises(SchemaError, match=r"in shapes \[\(1, 2\), \(2, 2\)\]"):
        made(routes(2), routes(2)[:, :1])
    broken = routes(2)
    broken[1, 0, 1] = -1
    with pytest.raises(SchemaError, match=r"routed_experts holds \[4, -1\] for one token and layer"):
        made(broken)
    td = group()
    td["routed_experts"] = td["routed_experts"].flatten(2)
    with pytest.raises(SchemaError, match=r"routed_experts has shape \[2, 5, 4\], expected \[2, 5, 'L', 'k'\]"):
        check_batch(td)

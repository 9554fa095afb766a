"""Laws of episodes with several turns: every token keeps its place and its numbers, and rewards cross observations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from forge.batch import check_batch, check_packed, collate, make_group
from forge.episodes import EpisodeTokens, make_episodes_group
from forge.errors import SchemaError
from forge.packing import first_fit, flatten, pack, pad
from forge.token_advantages import TokenRewards, reinforce_pp, spread, turn_rewards

Turns = list[tuple[int, int, bool]]
"""Of each turn: given tokens, sampled tokens, and whether the generator recorded supports and routes."""

turns = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans()), max_size=5)
groups = st.lists(turns, min_size=1, max_size=4).filter(lambda rows: any(n for row in rows for _, n, _ in row))


def supports(tokens: list[int], width: int) -> torch.Tensor:
    """`[n, width]`: each token alone, and beside its successor where that is even."""
    rows = [[token, token + 1 if token % 2 else -1, *[-1] * (width - 2)] for token in tokens]
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, width)


def routes(count: int, first: int) -> torch.Tensor:
    """`[count, 2, 2]`, all different."""
    return torch.arange(4 * first, 4 * (first + count)).reshape(count, 2, 2).short()


def episode(rows: Turns, number: int = 0) -> EpisodeTokens:
    """Tokens count up from 100 x number; the k-th turn is sampled by version k and earns k + 1."""
    out, token = EpisodeTokens(), 100 * number + 1
    out.given([token])
    for k, (observed, said, recorded) in enumerate(rows):
        token = 100 * number + len(out.tokens) + 1
        out.given(list(range(token, token + observed)))
        ids = list(range(token + observed, token + observed + said))
        known = {}
        if recorded and said:
            known = {"kept": supports(ids, 2 + k % 2), "routes": routes(len(out.tokens) + said - 1, 10 * k)}
        out.sampled(ids, [-float(i) for i in ids], [k] * said, **known)
        out.reward(k + 1.0)
    return out


def group(rows: list[Turns], group_id: int = 0) -> TensorDict:
    return make_episodes_group([episode(row, number) for number, row in enumerate(rows)], group_id=group_id)


@settings(max_examples=40, deadline=None)
@given(groups)
def test_every_token_keeps_its_place_its_numbers_and_nothing_else_is_trained(rows: list[Turns]) -> None:
    td = group(rows, group_id=7)
    check_batch(td)
    assert td["group_id"].tolist() == [7] * len(rows)
    for number, row in enumerate(rows):
        want_mask = [False] + [said for given_, n, _ in row for said in [False] * given_ + [True] * n]
        length = len(want_mask)
        want_tokens = [100 * number + 1 + i for i in range(length)]
        width = td["tokens"].shape[1]
        assert td["lengths"][number].item() == length
        assert td["tokens"][number].tolist() == want_tokens + [0] * (width - length)
        assert td["loss_mask"][number].tolist() == want_mask + [False] * (width - length)
        mask = td["loss_mask"][number]
        assert td["behavior_logprobs"][number][mask].tolist() == [-float(t) for t in td["tokens"][number][mask]]
        assert not td["behavior_logprobs"][number][~mask].any()
        assert td["token_versions"][number][mask].tolist() == [k for k, (_, n, _) in enumerate(row) for _ in range(n)]
        assert bool((td["token_versions"][number][~mask] == -1).all())
        assert td["rewards"][number].item() == sum(range(1, len(row) + 1))


@settings(max_examples=40, deadline=None)
@given(groups)
def test_what_was_recorded_of_a_turn_stays_with_its_tokens(rows: list[Turns]) -> None:
    td = group(rows)
    recorded = [[k for k, (_, n, known) in enumerate(row) if known and n] for row in rows]
    assert ("kept_tokens" in td) == ("routed_experts" in td) == any(recorded)
    if not any(recorded):
        return
    for number, row in enumerate(rows):
        start, so_far = 1, 0  # routes reach so far
        for k, (observed, said, known) in enumerate(row):
            start += observed
            kept = td["kept_tokens"][number, start : start + said]
            if known:
                tokens = td["tokens"][number, start : start + said].tolist()
                width = td["kept_tokens"].shape[2]
                assert torch.equal(kept, torch.nn.functional.pad(supports(tokens, 2), (0, width - 2), value=-1))
            else:
                assert bool((kept == -1).all())
            start += said
            if known and said:
                have = td["routed_experts"][number, so_far : start - 1]
                assert torch.equal(have, routes(start - 1, 10 * k)[so_far:])
                so_far = start - 1
        assert bool((td["routed_experts"][number, so_far:] == -1).all())


@settings(max_examples=25, deadline=None)
@given(st.lists(groups, min_size=1, max_size=3), st.integers(1, 30))
def test_packing_keeps_everything_of_episodes_with_holes(several: list[list[Turns]], max_tokens: int) -> None:
    made = [make_episodes_group([episode(row) for row in rows], group_id=i) for i, rows in enumerate(several)]
    shapes = [{key: td[key].shape[2:] for key in td.keys()} for td in made]  # noqa: SIM118
    if any(shape != shapes[0] for shape in shapes):
        made = made[:1]  # what was recorded must be alike in a batch
    whole = collate(made)
    check_batch(whole)
    rows = first_fit(whole["lengths"].tolist(), max_tokens)
    td = pack([flatten(one) for one in made], rows)
    check_packed(td)
    back, expected = pad([td]), whole[torch.tensor([episode for row in rows for episode in row])]
    assert set(back.keys()) == set(expected.keys())
    for key in expected.keys():  # noqa: SIM118
        assert torch.equal(back[key], expected[key]), key


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_one_turn_from_one_prompt_is_what_make_group_makes(counts: list[int]) -> None:
    prompt, versions = [5, 6], [[3] * n for n in counts]
    completions = [list(range(10, 10 + n)) for n in counts]
    logprobs = [[-0.5 * i for i in range(n)] for n in counts]
    known = {
        "kept": [supports(c, 3) for c in completions],
        "routes": [routes(1 + n, g) for g, n in enumerate(counts)],
    }
    want = make_group(prompt, completions, logprobs, versions, group_id=4, pad_id=9, **known)
    episodes = []
    for g in range(len(counts)):
        one = EpisodeTokens()
        one.given(prompt)
        one.sampled(completions[g], logprobs[g], versions[g], kept=known["kept"][g], routes=known["routes"][g])
        episodes.append(one)
    have = make_episodes_group(episodes, group_id=4, pad_id=9)
    assert set(have.keys()) == set(want.keys())
    for key in want.keys():  # noqa: SIM118
        assert have[key].dtype == want[key].dtype
        assert torch.equal(have[key], want[key]), key


# --- rewards


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.just(False)), min_size=1, max_size=5), st.floats(0, 1)
)
def test_a_reward_reaches_every_token_before_it_however_many_observations_lie_between(row: Turns, gamma: float) -> None:
    """The fault: returns that are reset at a hole of the mask lose every reward behind it (or before it)."""
    td = group([row])
    rewards = torch.tensor([[k + 1.0 for k in range(len(row))]])
    assert torch.equal(td["token_rewards"], turn_rewards(rewards, td["loss_mask"]))
    raw = spread(td["rewards"], td["loss_mask"], td["token_rewards"])
    found = reinforce_pp(TokenRewards(rewards=raw, loss_mask=td["loss_mask"], gamma=gamma))
    # By hand, along the sampled tokens alone.
    want: list[float] = []
    for k, (_, said, _) in reversed(list(enumerate(row))):
        for i in range(said):
            want.append((k + 1.0 if i == 0 else 0.0) + gamma * (want[-1] if want else 0.0))
    assert found[td["loss_mask"]].tolist() == pytest.approx(want[::-1])
    assert not found[~td["loss_mask"]].any()


def test_a_reward_goes_to_the_last_token_that_can_have_earned_it() -> None:
    one = EpisodeTokens()
    one.given([1])
    one.reward(8.0)  # nobody has spoken
    one.sampled([2, 3], [-1.0, -1.0], [0, 0])
    one.reward(1.0)
    one.reward(0.5)
    one.given([4])
    one.sampled([], [], [])  # an answer that was cut before its first token
    one.reward(-0.25)
    one.given([5])
    td = make_episodes_group([one], group_id=0)
    assert td["token_rewards"].tolist() == [[0.0, 0.0, 1.25, 0.0, 0.0]]
    assert td["rewards"].item() == 9.25


def test_groups_have_token_rewards_where_turns_have_or_where_it_is_said() -> None:
    def one() -> EpisodeTokens:
        out = EpisodeTokens()
        out.given([1])
        out.sampled([2], [-1.0], [0])
        return out

    earning = one()
    earning.reward(0.0)
    assert "token_rewards" not in make_episodes_group([one()], group_id=0)
    assert "token_rewards" in make_episodes_group([one(), earning], group_id=0)
    assert "token_rewards" in make_episodes_group([one()], group_id=0, turn_rewards=True)
    assert "token_rewards" not in make_episodes_group([earning], group_id=0, turn_rewards=False)


# --- what is no episode


def test_an_episode_whose_policy_never_spoke_counts_and_trains_nothing() -> None:
    mute, other = EpisodeTokens(), episode([(1, 2, False)])
    mute.given([1, 2, 3, 4, 5])
    mute.reward(-1.0)
    td = make_episodes_group([mute, other], group_id=0)
    check_batch(td)
    assert td["rewards"].tolist() == [-1.0, 1.0]
    assert td["loss_mask"].sum(dim=1).tolist() == [0, 2]
    with pytest.raises(SchemaError, match="no episode of 1 has a sampled token"):
        make_episodes_group([mute], group_id=0)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(SchemaError, match="begins with a sampled token"):
        EpisodeTokens().sampled([1], [-1.0], [0])
    with pytest.raises(SchemaError, match="0 episodes"):
        make_episodes_group([], group_id=0)
    with pytest.raises(SchemaError, match="episode 1 of 2 has 0 tokens"):
        make_episodes_group([episode([(0, 1, False)]), EpisodeTokens()], group_id=0)
    one = episode([])
    with pytest.raises(SchemaError, match=r"2 sampled tokens came with \{'logprobs': 1\}"):
        one.sampled([1, 2], [-1.0], [0, 0])
    with pytest.raises(SchemaError, match=r"\{'versions': 3, 'kept': 1\}"):
        one.sampled([1, 2], [-1.0, -1.0], [0, 0, 0], kept=supports([1], 2))
    with pytest.raises(SchemaError, match="routes of 4 tokens, the episode has 3"):
        one.sampled([1, 2], [-1.0, -1.0], [0, 0], routes=routes(4, 0))
    with pytest.raises(SchemaError, match="reward of a turn is nan"):
        one.reward(float("nan"))
    assert one == episode([])

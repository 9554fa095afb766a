"""What a step says of itself: only trained groups enter the averages, and what was dropped is counted by length."""

from __future__ import annotations

import pytest

from forge.metrics import METRIC_KEYS, make_row
from replay.buffer import ReplayBuffer
from replay.metrics import OUTCOMES, Counts, batch_stats, discard_rates, interval_stats
from replay.staleness import Admission
from replay.storage import Record


def record(*oldest: int, rewards: list[float] | None = None, length: int = 8) -> Record:
    rewards = rewards or [float(i) for i in range(len(oldest))]
    same = len(set(rewards)) == 1
    return Record({}, list(oldest), max(oldest), 10, rewards, same, [length] * len(oldest), 0.0, 0)


def test_the_histogram_has_a_share_for_every_staleness_up_to_the_bound() -> None:
    stats = batch_stats([record(5, 7), record(7, 7)], [1.0, 3.0], policy_version=7, max_staleness=3)
    assert [stats[f"staleness/hist/{n}"] for n in range(4)] == [0.75, 0, 0.25, 0]
    assert (stats["staleness/mean"], stats["staleness/max"], stats["staleness/bound"]) == (0.5, 2, 3)
    assert (stats["queue/age_mean_s"], stats["queue/age_max_s"]) == (2.0, 3.0)


def test_episodes_that_train_no_token_have_no_staleness() -> None:
    stats = batch_stats([record(-1, 6)], [0.0], policy_version=7, max_staleness=1)
    assert (stats["staleness/mean"], stats["staleness/hist/0"], stats["staleness/hist/1"]) == (1, 0, 1)
    stats = batch_stats([record(-1, -1)], [0.0], policy_version=7, max_staleness=1)
    assert (stats["staleness/mean"], stats["staleness/hist/0"]) == (0, 1)


def test_shares_are_of_what_ended_since_the_last_batch() -> None:
    counts = Counts(groups_added=8, groups_degenerate=2, tokens_trained=30, tokens_wasted=10, groups_straggled=1)
    stats = interval_stats(counts, [1.0, 2.0])
    assert (stats["waste/share"], stats["groups/degenerate_share"]) == (0.25, 0.25)
    assert (stats["replay/admission_wait_s"], stats["groups/straggled"]) == (1.5, 1)
    nothing = interval_stats(Counts(), [])
    assert (nothing["waste/share"], nothing["groups/degenerate_share"], nothing["replay/admission_wait_s"]) == (0, 0, 0)


@pytest.mark.parametrize("shuffled", [False, True])
def test_discard_rates_rise_with_the_length_where_long_episodes_are_dropped(shuffled: bool) -> None:
    outcomes = [(length, length > 75) for length in range(1, 101)]
    if shuffled:
        outcomes = outcomes[::-1]
    assert discard_rates(outcomes) == {"discard/q1": 0, "discard/q2": 0, "discard/q3": 0, "discard/q4": 1}


def test_equal_lengths_show_no_bias() -> None:
    rates = discard_rates([(10, i % 4 == 0) for i in range(400)])
    assert list(rates.values()) == [0.25] * 4


def test_a_quartile_without_episodes_is_absent() -> None:
    assert discard_rates([]) == {}
    assert discard_rates([(1, True), (2, False)]) == {"discard/q1": 1.0, "discard/q3": 0.0}


def test_no_dropped_group_enters_the_averages_of_the_trained_ones() -> None:
    now = 0.0
    buffer = ReplayBuffer(Admission(1, 2, start_version=9), degenerate="drop", clock=lambda: now)
    tickets = list(iter(buffer.reserve, None))
    buffer.add(tickets[0], record(9, 9, rewards=[100.0, 100.0]))
    buffer.add(tickets[1], record(3, 9, rewards=[50.0, 70.0]))
    for rewards in ([0.0, 1.0], [2.0, 3.0]):
        tickets += iter(buffer.reserve, None)
        buffer.add(tickets.pop(), record(9, 8, rewards=rewards))
    now = 5.0
    assert buffer.drop_stragglers(1.0) == 0, "the batch does not wait for them"
    choice = buffer.sample(9)
    assert choice is not None
    stats = batch_stats(choice.records, choice.ages_s, 9, 1) | interval_stats(buffer.counts, [])
    assert (stats["reward/mean"], stats["staleness/max"], stats["queue/age_mean_s"]) == (1.5, 1, 5.0)
    assert (stats["tokens/trained"], stats["tokens/wasted"]) == (20, 20)
    assert (stats["episodes/trained"], stats["episodes/dropped"]) == (4, 4)


def test_the_keys_of_a_step_are_keys_of_a_row() -> None:
    stats = batch_stats([record(0)], [0.0], 0, 2) | interval_stats(Counts(), []) | discard_rates([(1, True)])
    row = make_row(dict.fromkeys(METRIC_KEYS, 0) | stats)
    assert row["staleness/hist/2"] == 0
    assert row["discard/q1"] == 1


def test_the_discard_rates_look_back_over_the_last_episodes_only() -> None:
    buffer = ReplayBuffer(Admission(0, 1), degenerate="drop", max_degenerate_in_a_row=10**6)
    for length, rewards in [(99, [1.0, 1.0]), (5, [0.0, 1.0])]:
        for _ in range(OUTCOMES // 2):
            ticket = buffer.reserve()
            assert ticket is not None
            version = buffer.admission.next_version
            buffer.add(ticket, record(version, version, rewards=rewards, length=length))
            if rewards[0] != rewards[1]:
                assert buffer.sample(version) is not None
                buffer.release(version + 1)
    assert set(buffer.outcomes) == {(5, False)}

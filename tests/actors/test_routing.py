"""Laws of actors/routing.py: conversations come back to their prefix, and never wait for a place that others have."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from actors.routing import Load
from actors.routing import Router as NamedRouter

loads = st.lists(
    st.builds(Load, running=st.integers(0, 40), places=st.integers(1, 16), flipping=st.booleans()),
    min_size=1,
    max_size=5,
)


class Router(NamedRouter):
    """With numbers for names, which are shorter to write."""

    def choose_of(self, loads: Sequence[Load], affinity: str = "") -> int:
        return int(self.choose({str(number): load for number, load in enumerate(loads)}, affinity))


def idle(count: int) -> list[Load]:
    return [Load(0, 8) for _ in range(count)]


def test_without_affinity_the_least_busy_takes_it() -> None:
    router = Router()
    assert router.choose_of([Load(3, 8), Load(1, 8), Load(2, 8)]) == 1
    assert router.choose_of([Load(8, 64), Load(2, 8)]) == 0, "busy is against its places"


@given(loads)
def test_what_is_about_to_flip_takes_nothing_that_another_can(found: list[Load]) -> None:
    chosen = Router().choose_of(found)
    assert not found[chosen].flipping or all(load.flipping for load in found)


def test_a_conversation_comes_back_while_there_is_a_place() -> None:
    router = Router()
    assert router.choose_of([Load(1, 8), Load(0, 8)], "a") == 1
    assert router.choose_of([Load(0, 8), Load(7, 8)], "a") == 1
    assert router.choose_of([Load(0, 8), Load(7, 8)], "b") == 0


def test_it_moves_where_it_would_wait_while_others_are_free_and_stays_there() -> None:
    router = Router()
    assert router.choose_of([Load(1, 8), Load(0, 8)], "a") == 1
    assert router.choose_of([Load(0, 8), Load(8, 8)], "a") == 0
    assert router.choose_of(idle(2), "a") == 0, "its prefix lies there now"


def test_all_busy_it_does_not_move_for_a_little() -> None:
    router = Router()
    router.choose_of([Load(1, 8), Load(0, 8)], "a")
    assert router.choose_of([Load(9, 8), Load(11, 8)], "a") == 1
    assert router.choose_of([Load(9, 8), Load(12, 8)], "a") == 0


def test_before_a_flip_it_moves_since_its_cache_ends() -> None:
    router = Router()
    router.choose_of([Load(1, 8), Load(0, 8)], "a")
    assert router.choose_of([Load(5, 8), Load(0, 8, flipping=True)], "a") == 0
    router.choose_of([Load(0, 8, flipping=True), Load(0, 8, flipping=True)], "a")


@given(loads, st.text(min_size=1, max_size=3))
def test_nobody_waits_while_another_has_a_place_and_does_not_flip(found: list[Load], name: str) -> None:
    router = Router()
    router.choose_of(found, name)
    chosen = found[router.choose_of(found, name)]
    free = any(load.running < load.places and not load.flipping for load in found)
    assert not free or chosen.running < chosen.places


def test_it_remembers_the_latest_only_and_forgets_what_is_over() -> None:
    router = Router(remembered=2)
    for name in "abc":
        router.choose_of([Load(1, 8), Load(0, 8)], name)
    assert router.choose_of([Load(0, 8), Load(1, 8)], "a") == 0, "long ago"
    assert router.choose_of([Load(0, 8), Load(1, 8)], "c") == 1
    router.forget("c")
    assert router.choose_of([Load(0, 8), Load(1, 8)], "c") == 0


def test_what_is_lost_takes_nothing_and_has_no_prefixes_when_it_comes_back() -> None:
    router = NamedRouter()
    loads = {"a": Load(0, 8), "b": Load(1, 8)}
    assert router.choose(loads, "talk") == "a"
    router.lose("a")
    assert router.choose({"b": Load(7, 8)}, "talk") == "b"
    assert router.choose(loads | {"b": Load(7, 8)}, "talk") == "b", "its prefix lies there now"
    assert router.choose({"c": Load(0, 8)}, "talk") == "c", "its home is away"

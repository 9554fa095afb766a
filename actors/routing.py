"""Which replica takes a request: the one that has its prefix in the KV cache, unless that is too busy. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """Of one replica: sequences that run or wait there, how many it decodes at once, whether it is about to flip."""

    running: int
    places: int
    flipping: bool = False


class Router:
    """Remembers where the latest request of each conversation went, of the `remembered` latest conversations."""

    def __init__(self, remembered: int = 65536) -> None:
        self._remembered = remembered
        self._homes: OrderedDict[str, str] = OrderedDict()

    def choose(self, loads: Mapping[str, Load], affinity: str = "") -> str:
        """One of `loads`, by the replica's name. `affinity` names a conversation; "" has none.

        A conversation goes back to where it was while there is a place. It moves to where there is one, since computing
        its prefix anew costs less than a wait; and where there is none, if another is less busy by a quarter of its
        places. Others go to the fewest sequences.
        """
        least = min(loads, key=lambda name: (loads[name].flipping, loads[name].running / loads[name].places))
        home = self._homes.get(affinity)
        chosen = home if home is not None and home in loads and _worth_it(loads[home], loads[least]) else least
        if affinity:
            self._homes[affinity] = chosen
            self._homes.move_to_end(affinity)
            while len(self._homes) > self._remembered:
                self._homes.popitem(last=False)
        return chosen

    def lose(self, replica: str) -> None:
        """The replica's prefixes are gone."""
        self._homes = OrderedDict((name, home) for name, home in self._homes.items() if home != replica)

    def forget(self, affinity: str) -> None:
        """The conversation is over."""
        self._homes.pop(affinity, None)


def _worth_it(home: Load, least: Load) -> bool:
    if home.flipping and not least.flipping:
        return False  # its cache is of the version that ends
    if home.running < home.places or least.running < least.places:
        return home.running < home.places
    return home.running / home.places <= least.running / least.places + 0.25

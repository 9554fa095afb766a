"""Which episodes the page shows, and how they read. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from forge.report.runs import Episode
from forge.report.words import escaped, number

EACH = 3
MAX_CHARACTERS = 6000
NUM_SHADES = 6


def best(episodes: Sequence[Episode]) -> list[Episode]:
    """Those with the highest rewards, of equals the latest; no text twice."""
    return _first(sorted(_scored(episodes), key=lambda e: (-(e.reward or 0.0), -e.step)))


def worst(episodes: Sequence[Episode]) -> list[Episode]:
    """Those with the lowest."""
    return _first(sorted(_scored(episodes), key=lambda e: (e.reward or 0.0, -e.step)))


def _scored(episodes: Sequence[Episode]) -> list[Episode]:
    return [episode for episode in episodes if episode.reward is not None]


def _first(episodes: Sequence[Episode]) -> list[Episode]:
    seen: dict[tuple[str, str], Episode] = {}
    for episode in episodes:
        seen.setdefault((episode.prompt, episode.completion), episode)
        if len(seen) == EACH:
            break
    return list(seen.values())


def card(episode: Episode) -> str:
    """One episode: what was given, what was sampled, by which version."""
    versions = sorted({version for _, version in episode.pieces if version >= 0} or set(episode.versions))
    return (
        f'<article class="episode"><header><b>reward {number(episode.reward)}</b> <span>step {episode.step:,}</span> '
        f"{_legend(versions, bool(episode.pieces))}</header><pre>{_body(episode, versions)}</pre></article>"
    )


def _legend(versions: Sequence[int], coloured: bool) -> str:
    if not versions:
        return ""
    if not coloured and len(versions) > 1:
        return f"<span>sampled by versions {', '.join(map(str, versions))}; which token by which was not kept</span>"
    marks = (f'<span class="v v{n % NUM_SHADES}">version {version}</span>' for n, version in enumerate(versions))
    return f"<span>sampled by</span> {' '.join(marks)}"


def _body(episode: Episode, versions: Sequence[int]) -> str:
    shade = {version: n % NUM_SHADES for n, version in enumerate(versions)}
    pieces = episode.pieces or ((episode.prompt, -1), (episode.completion, versions[0] if len(versions) == 1 else -2))
    left, parts = MAX_CHARACTERS, []
    for text, version in pieces:
        kept = text[:left]
        left -= len(kept)
        if version == -1:
            parts.append(f'<span class="given">{escaped(kept)}</span>')
        elif version < 0:
            parts.append(f'<span class="v">{escaped(kept)}</span>')
        else:
            parts.append(f'<span class="v v{shade[version]}" title="version {version}">{escaped(kept)}</span>')
        if left <= 0:
            parts.append(f"<i>… cut here: {sum(len(t) for t, _ in pieces):,} characters</i>")
            break
    return "".join(parts)

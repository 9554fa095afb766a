"""Numbers as people read them, and text that cannot become markup. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence


def escaped(text: object) -> str:
    """Text of anybody's, safe inside an element and inside a quoted attribute."""
    # Lone surrogates have no UTF-8; control characters besides tab and line feed are not allowed in a page.
    clean = str(text).encode("utf-8", "replace").decode("utf-8")
    clean = "".join(c if c in "\t\n" or (ord(c) >= 32 and not 0x7F <= ord(c) < 0xA0) else "�" for c in clean)
    return html.escape(clean, quote=True)


def number(value: float | None, digits: int = 3) -> str:
    """Three digits that matter; "-" for what was not measured."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 10**digits or value == int(value):
        return f"{value:,.0f}" if size < 1e9 else f"{value:.2e}"
    if size < 1e-4:
        return f"{value:.1e}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(size)))}f}"


def percent(share: float | None) -> str:
    """A share of 1 as a percentage; one digit behind the point below ten."""
    if share is None or not math.isfinite(share):
        return "-"
    if 0 < abs(share) < 0.0005:
        return "under 0.1 %"
    return f"{share:.1%}".replace("%", " %").replace(".0 %", " %") if abs(share) < 0.1 else f"{share * 100:.0f} %"


def duration(seconds: float | None) -> str:
    """Seconds as milliseconds, seconds, minutes or hours."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds == 0:
        return "0 s"
    if seconds < 0.001:
        return f"{number(seconds * 1e6, 2)} µs"
    if seconds < 1:
        return f"{number(seconds * 1e3)} ms"
    if seconds < 60:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def size(num_bytes: float) -> str:
    """Bytes in the unit that fits."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{number(num_bytes / scale)} {unit}"
    return f"{num_bytes:.0f} bytes"


def table(heads: Sequence[str], rows: Sequence[str]) -> str:
    """A table that scrolls by itself where it is too wide; heads are texts, rows the markup of their cells."""
    head = "".join(f"<th>{escaped(name)}</th>" for name in heads)
    body = "".join(f"<tr>{cells}</tr>" for cells in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

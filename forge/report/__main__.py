"""One HTML file about one run or several side by side.

    python -m forge.report runs/NAME                      # writes runs/NAME/report.html
    python -m forge.report runs/SYNC runs/ASYNC -o a.html  # the others against the first

It needs no network and no script to be read, and goes by mail as one file. A run may still go on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from forge.errors import ConfigError
from forge.report.page import page
from forge.report.runs import read_runs


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code, 2 for a folder that is no run."""
    parser = argparse.ArgumentParser(prog="python -m forge.report", description="Write one HTML page about runs.")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders; others are compared with the first")
    parser.add_argument("-o", "--out", type=Path, help="file to write (report.html in the folder of the first run)")
    args = parser.parse_args(argv)
    out = args.out or args.runs[0] / "report.html"
    try:
        html = page(read_runs(args.runs))
        out.write_text(html, encoding="utf-8")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{out} cannot be written: {error.strerror or error}; give --out another file", file=sys.stderr)
        return 2
    print(f"{out}  ({len(html.encode()):,} bytes)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

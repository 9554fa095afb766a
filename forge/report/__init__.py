"""One page about one run or several: `python -m forge.report runs/NAME`."""

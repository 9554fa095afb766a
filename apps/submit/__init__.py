"""Runs on clusters: `python -m apps.submit`."""

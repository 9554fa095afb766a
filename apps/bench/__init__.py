"""Benchmarks: each prints a table, then one JSON line."""

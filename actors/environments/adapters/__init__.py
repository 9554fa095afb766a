"""Environments of other libraries as ours, each in a file of its own."""

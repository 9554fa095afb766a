"""Looks at the machine before a run does."""

"""A user's own actor on its own mesh."""

"""A reward model from pairs."""

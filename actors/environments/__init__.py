"""Environments of episodes, their pools, and the sandbox for what they run."""

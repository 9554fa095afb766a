"""What asynchrony would gain with an environment, measured and simulated before a run."""

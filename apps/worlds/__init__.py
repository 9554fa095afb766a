"""GRPO in an environment: episodes of several turns."""

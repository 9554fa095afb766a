"""GRPO for an agent that speaks to an OpenAI-compatible server and knows nothing of its training."""

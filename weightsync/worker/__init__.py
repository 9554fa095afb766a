"""What runs inside vLLM's worker: receiving, staging, flipping."""

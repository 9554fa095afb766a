"""Direct preference optimisation: on pairs that are there, or on pairs of rollouts."""

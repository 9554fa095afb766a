"""Where finished groups wait for the trainer, and where staleness is bounded. Imports only `forge`."""

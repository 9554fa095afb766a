"""The actors: thin Monarch shells over classes that also work without Monarch."""

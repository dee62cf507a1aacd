"""One device: how a block of similarities is walked tile by tile. Knows nothing of ranks."""

"""One device: passes over the tiles of a block of similarities. Knows nothing of ranks."""

"""Late interaction: scores, losses, operators, tiles and kernels of embeddings with one vector per token."""

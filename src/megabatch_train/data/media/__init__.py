"""Images and recordings: decoding, and random crops for training."""

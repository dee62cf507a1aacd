"""Estimates the memory and time of a training step without running it."""

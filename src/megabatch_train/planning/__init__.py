"""Memory and time of a training step, estimated before it is run."""

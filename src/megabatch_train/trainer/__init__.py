"""The application: trains two towers from a config, with checkpoints, evaluations and logs. See docs/training.md."""

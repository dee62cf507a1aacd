"""Numbers, tables, plots and pages for reports, benchmarks and plans, and observers that show the progress of a run.

This package exports the observers: a progress bar in the terminal, TensorBoard, and Weights & Biases.
"""

from megabatch_train.display.observers import ProgressDisplay, TensorBoardLog, WandbLog

__all__ = ["ProgressDisplay", "TensorBoardLog", "WandbLog"]

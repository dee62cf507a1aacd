"""Presentation: numbers, tables, plots and pages for reports, benchmarks and plans; observers that show a run's progress.

The observers are exported here: a bar in the terminal, TensorBoard, Weights & Biases.
"""

from megabatch_train.display.observers import ProgressDisplay, TensorBoardLog, WandbLog

__all__ = ["ProgressDisplay", "TensorBoardLog", "WandbLog"]

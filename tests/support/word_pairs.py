"""A small table of texts, and `megabatch train` on it, for tests of the command line."""

import json

from megabatch_train import cli
from megabatch_train.commands import train
from megabatch_train.trainer.run import MetricsFile

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
SETTINGS = 'data = "pairs.jsonl"\nbatch_size = 6\n[model_options]\nwidth = 16\nbuckets = 256\n'


def enter(folder, monkeypatch):
    """Writes the table and its settings into the folder, and makes it the current folder. Displays are off."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(train, "_list_observers", lambda args: [MetricsFile()])
    lines = [json.dumps({"query": f"number {word}", "document": f"what comes after {word}"}) for word in WORDS]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    (folder / "small.toml").write_text(SETTINGS)
    return folder


def call(*arguments):
    return cli.main(["train", "--config", "small.toml", "--no-report", *arguments])

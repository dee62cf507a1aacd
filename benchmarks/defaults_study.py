"""Does a run without flags learn? Trains open_clip models from random weights on Flickr8k with default settings.

    python benchmarks/defaults_study.py --data FOLDER --seconds 500                        one GPU, minutes
    python benchmarks/defaults_study.py --data FOLDER --models replica --batches 64        a CPU, an hour
    python benchmarks/report.py benchmarks/results/defaults_study.jsonl                    table and plot, on any machine

Each run writes a line to defaults_study.jsonl and is not repeated, so several calls with `--seconds` can complete the study.
The smallest runs are first. The model `replica` has the width and depth of ViT-B-32, but images of four patches and texts of 16
tokens, so that a CPU can train it.

Settings:
    defaults   no flags
    fast       the learning rate increases to 5e-4 within a tenth of the run
    dropped    half of the patches are dropped, except in the last tenth of the run
    small      images have half of the side, except in the last fifth of the run
    both       images have half of the side and half of the patches, except in the last fifth of the run

Recall at equal time, for runs of several lengths:

    python benchmarks/defaults_study.py --data FOLDER --name tokens_study --compile --batches 4096 --steps 200 400 800 \\
        --models ViT-B-32 ViT-B-16 --settings defaults dropped small both
"""

import argparse
import json
import math
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flickr8k_data import HELD_OUT, TEST, TRAIN, Captioned, make_noise, read

from megabatch.world import World
from megabatch_train import machine, towers
from megabatch_train.bench.measure import arguments
from megabatch_train.data.resident import Resident
from megabatch_train.display import plots
from megabatch_train.display.tables import TextTable
from megabatch_train.evaluation import results
from megabatch_train.trainer import config as configs
from megabatch_train.trainer.loop import Trainer
from megabatch_train.trainer.run import METRICS, MetricsFile

SETTINGS = ("defaults", "fast", "dropped", "small", "both")
DROPPED, FULL_SHARE = 0.5, 0.2  # fraction of dropped patches; fraction of the steps with images of full size
TEXT = {"vocab_size": 49408, "width": 512, "heads": 8, "layers": 12}
REPLICAS = {
    "replica": {
        "embed_dim": 512,
        "vision_cfg": {"image_size": 64, "layers": 12, "width": 768, "patch_size": 32},
        "text_cfg": {"context_length": 16, **TEXT},
    },
    "tiny": {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
        "text_cfg": {"context_length": 16, **TEXT, "width": 64, "heads": 1, "layers": 1},
    },
}
RECALLS = ("image_to_text_R@10", "text_to_image_R@10")
LAST = 5  # the table shows the mean loss of the last steps
FIRST_GUESS = 3000.0  # assumed pairs per second, until a run of the model has been timed


class Setting(NamedTuple):
    """The settings of a run."""

    model: str
    batch_size: int
    steps: int
    seed: int
    settings: str


class Progress(MetricsFile):
    """Prints the loss of some steps."""

    def step(self, record: dict[str, Any]) -> None:
        """Adds a line to the file, and prints every tenth."""
        super().step(record)
        if record["step"] % 10 == 0:
            print(f"  step {record['step']}: loss {record['loss']:.3f}, {record['pairs_per_second']:,.0f} pairs/s", flush=True)


class Study:
    """Makes the runs that are not in the file, until the time limit."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.file: Path = options.output / f"{options.name}.jsonl"
        self.until = time.monotonic() + options.seconds
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.pictures = make_noise(48) if options.data is None else read(options.data)
        self.held_out = 12 if options.data is None else HELD_OUT
        self.machine = machine.summary(machine.describe())
        self.rates: dict[str, float] = {}  # pairs per second of each model
        self.data: dict[str, tuple[Resident, Resident]] = {}  # training data and test data of each model

    def work(self) -> None:
        """Makes the runs, smallest first."""
        finished = {setting_of(line) for line in results.read(self.file)} if self.file.exists() else set()
        for setting in sorted(self.list_runs() - finished, key=lambda one: (one.batch_size * one.steps, *one)):
            expected = setting.batch_size * setting.steps / self.rates.get(setting.model, FIRST_GUESS)
            if time.monotonic() + expected > self.until:
                print(f"no time for {' '.join(map(str, setting))}", flush=True)
                continue
            line = self.run(setting)
            self.rates[setting.model] = setting.batch_size * setting.steps / line["seconds"]
            results.append(self.file, line)
            print(
                f"{' '.join(map(str, setting))}: loss {line['losses'][-1]:.3f}, log B {math.log(setting.batch_size):.3f}",
                flush=True,
            )

    def list_runs(self) -> set[Setting]:
        """Returns all runs that the command line names."""
        options = self.options
        return {
            Setting(model, batch, steps, seed, settings)
            for model in options.models
            for batch in options.batches
            for steps in options.steps
            for seed in options.seeds
            for settings in options.settings
        }

    def run(self, setting: Setting) -> dict[str, Any]:
        """Trains a model to the last step, even if the loss does not decrease, and evaluates it."""
        name = add_replica(setting.model) if setting.model in REPLICAS else setting.model
        config = configs.resolve(
            {
                "data": "Flickr8k",
                "model": f"open_clip:{name}",
                "batch_size": setting.batch_size,
                "steps": setting.steps,
                "seed": setting.seed,
                "collapse": "warn",
                "workers": 0,
                # Gradients are the same without compilation and with any chunk size. Compilation pays from 4,096 pairs on.
                "compile": "on" if self.options.compile else "off",
                "chunk_size": 512,
                "memory": {"graphs": 0.4},
                "checkpoint": {"every": setting.steps, "minutes": 0.0, "keep": 1},
            },
            changes(setting, small_side(name)),
        )
        torch.manual_seed(setting.seed)
        pair = towers.load(config.model, **config.model_options)
        train, test = self.prepare(setting.model, pair)
        folder = Path(tempfile.mkdtemp(prefix="defaults-study-"))
        start = time.monotonic()
        try:
            trainer = Trainer(config, pair, train, folder, validation=test, observers=[Progress()], world=World(self.device))
            metrics = trainer.fit()
            train_seconds = trainer.run.seconds
            records = [record for record in results.read(folder / METRICS) if "loss" in record]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        assert metrics is not None
        return {
            **setting._asdict(),
            "losses": [round(record["loss"], 4) for record in records],
            "spreads": [float(f"{record['spread']:.3g}") for record in records],
            "highest_rate": max(record["learning_rate"] for record in records),
            "problems": [record["problem"] for record in records if "problem" in record],
            **{name: metrics[name] for name in RECALLS},
            "images": self.held_out,
            "seconds": round(time.monotonic() - start, 1),
            "train_seconds": round(train_seconds, 2),
            "machine": self.machine,
        }

    def prepare(self, model: str, pair: towers.Pair) -> tuple[Resident, Resident]:
        """Returns the training pairs and the test pairs on the device. They are prepared once for each model."""
        if model not in self.data:
            train, test = (
                Resident(Captioned(self.pictures, self.held_out, part), pair.towers, self.device, augment=part == TRAIN)
                for part in (TRAIN, TEST)
            )
            self.data[model] = train, test
        return self.data[model]


def small_side(architecture: str) -> int:
    """Returns about half of the side of a model's images in pixels, as a multiple of the side of a patch."""
    import open_clip

    config = open_clip.get_model_config(architecture)["vision_cfg"]
    patch = config.get("patch_size") or 1
    return max(patch, patch * round(config["image_size"] / 2 / patch))


def changes(setting: Setting, side: int) -> dict[str, Any]:
    """Returns the settings that differ from the defaults. `side` is the side of small images."""
    dropout = {"model_options": {"patch_dropout": DROPPED}}
    full = max(1, round(FULL_SHARE * setting.steps))
    stages = [{"steps": setting.steps - full, "image_size": side}, {"steps": full, "patch_dropout": 0.0}]
    return {
        "defaults": {},
        "fast": {"optimizer": {"lr": 5e-4}, "schedule": {"warmup_fraction": 0.1}},
        "dropped": dropout | {"schedule": {"unmask_fraction": FULL_SHARE / 2}},
        "small": {"steps": 0, "stage": stages},
        "both": dropout | {"steps": 0, "stage": stages},
    }[setting.settings]


def setting_of(line: dict[str, Any]) -> Setting:
    """Returns the settings of the run of a line."""
    return Setting(*(line[name] for name in Setting._fields))


def add_replica(name: str) -> str:
    """Adds a model to open_clip and returns its name."""
    import open_clip

    full_name = f"defaults-study-{name}"
    if full_name not in open_clip.list_models():
        with tempfile.TemporaryDirectory() as folder:
            config_file = Path(folder) / f"{full_name}.json"
            config_file.write_text(json.dumps(REPLICAS[name]))
            open_clip.add_model_config(config_file)
    return full_name


def report(path: Path) -> str:
    """Writes the table (.md) and the plot (.svg) into the folder of the file. Returns the table as text."""
    lines = results.read(path)
    lines.sort(key=lambda line: (line["model"], line["batch_size"], line["steps"], line["settings"], line["seed"]))
    report_table = table(lines)
    machines = ", ".join(dict.fromkeys(line["machine"] for line in lines))
    path.with_suffix(".md").write_text(f"{report_table.markdown()}\n\nMachine: {machines}.\n")
    if plots.available():
        plots.save(draw(lines), path.with_suffix(".svg"))
    return report_table.text()


def table(lines: list[dict[str, Any]]) -> TextTable:
    """Returns the table with a row for each run."""
    rows, has_seconds = [], all("train_seconds" in line for line in lines)
    for line in lines:
        tail, images = line["losses"][-LAST:], line["images"]
        cells = [line["model"], line["settings"], f"{line['batch_size']:,}", line["steps"], line["seed"]]
        cells += [
            f"{line['highest_rate']:.1e}",
            f"{sum(tail) / len(tail):.3f}",
            f"{math.log(line['batch_size']):.3f}",
            f"{line['spreads'][-1]:.1e}",
        ]
        cells += [f"{100 * line['text_to_image_R@10']:.1f}", f"{1000 / images:.1f}"]
        cells += [f"{line['train_seconds']:.0f}"] if has_seconds else []
        cells.append("yes" if line["problems"] else "")
        rows.append(cells)
    headings = ["model", "settings", "batch", "steps", "seed", "highest lr", "loss"]
    headings += ["log B", "spread", "R@10, %", "chance, %", *(["seconds"] if has_seconds else []), "warned"]
    return TextTable(
        headings,
        rows,
        title="Training from random weights on Flickr8k",
        notes=f"loss: mean of the last {LAST} steps. spread: 1 − mean cosine between different samples. R@10: text to image.",
        names=(0, 1),
    )


def draw(lines: list[dict[str, Any]]) -> Any:
    """Draws recall against seconds, or the loss minus log B against the step, with one panel for each model and batch size.

    It draws recall if a run has fewer tokens.
    """
    if any(line["settings"] in ("dropped", "small", "both") for line in lines):
        return _draw_recall([line for line in lines if "train_seconds" in line])
    cases = list(dict.fromkeys((line["model"], line["batch_size"]) for line in lines))
    figure, panels = plots.panels("Loss of default settings compared with chance", len(cases))
    colors = {"defaults": plots.GREEN, "fast": plots.ORANGE}
    for axes, (model, batch) in zip(panels, cases, strict=True):
        labeled = set()
        for line in (line for line in lines if (line["model"], line["batch_size"]) == (model, batch)):
            name = line["settings"]
            points = [(step, loss - math.log(batch)) for step, loss in enumerate(line["losses"], 1)]
            label = "_" if name in labeled else name  # all seeds share a name
            plots.line(axes, points, label, colors[name], marker="", linewidth=1.2)
            labeled.add(name)
        axes.axhline(0, color=plots.INK, linewidth=0.8, linestyle="--")
        axes.set(title=f"{model}, {batch:,} pairs", xlabel="step", ylabel="loss − log B")
        plots.label_lines(axes)
    return figure


def _draw_recall(lines: list[dict[str, Any]]) -> Any:
    cases = list(dict.fromkeys((line["model"], line["batch_size"]) for line in lines))
    figure, panels = plots.panels("Recall against the time of training", len(cases))
    colors = dict(zip(SETTINGS, (plots.GREEN, plots.GREY, plots.ORANGE, plots.BLUE, plots.INK), strict=True))
    for axes, (model, batch) in zip(panels, cases, strict=True):
        for name in SETTINGS:
            own = [line for line in lines if (line["model"], line["batch_size"], line["settings"]) == (model, batch, name)]
            by_steps: dict[int, list[dict[str, Any]]] = {}
            for line in own:
                by_steps.setdefault(line["steps"], []).append(line)
            points = [  # means over seeds
                tuple(sum(line[key] for line in runs) / len(runs) for key in ("train_seconds", "text_to_image_R@10"))
                for _, runs in sorted(by_steps.items())
            ]
            if points:
                plots.line(axes, [(seconds, 100 * recall) for seconds, recall in points], name, colors[name])
        axes.set(title=f"{model}, {batch:,} pairs", xlabel="seconds of all steps", ylabel="text to image R@10, %")
        plots.label_lines(axes)
    return figure


def main() -> None:
    """Makes the runs and the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="folder with Flickr8k (required without --tiny)")
    add("--models", nargs="+", default=["ViT-B-32", "ViT-B-16", "RN50"], help="models of open_clip, or replica")
    add("--batches", nargs="+", type=int, default=[256, 1024, 4096, 16384, 32768])
    add("--steps", nargs="+", type=int, default=[100])
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--compile", action="store_true", help="compile the towers, which saves time in runs with large batches")
    add("--settings", nargs="+", choices=SETTINGS, default=["defaults", "fast"])
    arguments(parser, "defaults_study", seconds=500.0)
    options = parser.parse_args()
    if options.tiny:
        options.models, options.batches, options.steps, options.seeds = ["tiny"], [32], [6], [0]
    elif options.data is None:
        parser.error("--data must name the folder of Flickr8k, unless --tiny is given")
    study = Study(options)
    study.work()
    if study.file.exists():
        print(report(study.file))


if __name__ == "__main__":
    main()

"""Compares gradient caching with the cached loss of sentence-transformers, for decoders with the shapes of Qwen3-0.6B and 8B.

The decoders have random weights, encode texts, and pool the last token. Texts are random tokens with lognormal lengths. They
are queries, documents, and one hard negative per query. For the 0.6B model, all weights are trained in float32 with bf16
autocast. The 8B model has bf16 weights and trains LoRA adapters. Without PEFT, it trains its last layers. `--peers FOLDER` can
provide PEFT.

Before the timing, the gradients of every system are compared with a plain step, in float32 with a small decoder. The first
system of each library tries several chunk sizes on the smallest batch, and all systems of the library use the fastest one. Some
systems compile the layers. If a timed step compiles anything, it is timed again.
"""

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from decoders_gpu_systems import (
    LARGE,
    LONGEST,
    OURS_LIBRARY,
    SMALL,
    SYSTEMS,
    THEIRS,
    TINY,
    WITH_COMPILER,
    Setting,
    Shape,
    System,
    compilations,
    decoder,
    plain,
    rehearse_loss,
    texts,
)

from megabatch_train.bench.measure import (
    LATE,
    OK,
    WRONG,
    Record,
    arguments,
    chip,
    clear,
    device_of,
    failure,
    groups,
    now,
    paragraphs,
    peak_memory,
    relative_error,
    take_gradients,
    write_report,
)
from megabatch_train.display import plots
from megabatch_train.display.tables import TextTable, cell, gib, ratio
from megabatch_train.towers.sentence_transformer import TextEncoder

CHECK, CHECK_TOKENS, TOLERANCE = (
    12,
    200,
    1e-3,
)  # pairs, tokens of a chunk, relative error of the norm of all gradients in float32


WORTH_A_WARM_UP = 10.0  # seconds; longer steps have no warm-up, and are timed again if they compile
ATTEMPTS = 2


@dataclass(eq=False)
class Model:
    """A decoder, and numbers that later rows of the table need."""

    shape: Shape
    encoder: TextEncoder | None = None
    trained_parameters: str = ""
    tokens: dict[str, int] = field(default_factory=dict)  # tokens of a chunk, by library
    pace: dict[str, float] = field(default_factory=dict)  # seconds per pair, by system

    def step(self, name: str, pairs: int) -> float:
        """Returns the expected seconds of a step, from the last step of the system, or 0 if there is none."""
        return self.pace.get(name, 0.0) * pairs

    def needs(self, name: str, pairs: int) -> float:
        """Returns the expected seconds of a row, with its warm-up and a margin."""
        return 1.2 * self.step(name, pairs) * (2 if self.step(name, pairs) < WORTH_A_WARM_UP else 1)


class Bench:
    """Measures all shapes.

    Args:
        args: arguments of the command line.
        name: name of the script.
        systems: the systems to measure.
        compiled: the system that is checked in place of each compiled system.
        checked: shapes for the comparison with the plain step.
        longest: most tokens of a text.
        least: fewest tokens of a text.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        name: str = "decoders_gpu",
        systems: Mapping[str, System] = SYSTEMS,
        compiled: Mapping[str, str] = WITH_COMPILER,
        checked: Sequence[Shape] = TINY,
        longest: int = LONGEST,
        least: int = 4,
    ) -> None:
        self.args, self.device = args, device_of(args)
        self.record = Record.of_script(name, args, args.seconds, checks=[], models={})
        self.systems, self.compiled, self.checked, self.least = systems, compiled, checked, least
        self.usable = dict.fromkeys(systems, OK)
        self.longest = 64 if args.tiny else longest

    def texts(self, shape: Shape, pairs: int, longest: int) -> list[dict[str, Any]]:
        """Returns the columns of a batch."""
        return texts(pairs, shape.config["vocab_size"], self.device, longest, shape.means, shape.spread, self.least)

    def check(self) -> None:
        """Compares the gradients of every system that is not compiled with the plain step, for all weights and for adapters."""
        for shape in self.checked:
            encoder, trained = decoder(shape, self.device, half=False)
            s = Setting(encoder, self.texts(shape, CHECK, 64), CHECK_TOKENS, self.device, autocast=False)
            encoder.pad()
            plain(s)
            expected = take_gradients(encoder)
            for name, step in self.systems.items():
                if name in self.compiled or self.usable[name] != OK:
                    continue
                result: dict[str, Any] = {"system": name, "trained": trained, "status": OK}
                try:
                    step.prepare(encoder)
                    step(s)
                    result["gradient_error"] = relative_error(take_gradients(encoder), expected)
                    result["status"] = OK if result["gradient_error"] <= TOLERANCE else WRONG
                except Exception as error:  # a library can fail in any way; the others are still measured
                    result["status"] = failure(error)
                self.usable[name] = result["status"]
                self.record["checks"].append(result)
                self.record.say(f"{name}, {trained}: {result['status']}, {result.get('gradient_error', math.nan):.1e}")
                take_gradients(encoder)
        for name, same in self.compiled.items():
            self.usable[name] = self.usable[same] if self.device == "cuda" else "only on a GPU"

    def run(self, shapes: Sequence[Shape]) -> None:
        """Measures all rows, the smallest batch of all models first, and writes a report after each row."""
        for model, batch, name in rows_of([Model(shape) for shape in shapes], self.systems):
            self.record["results"].append(self.row(model, batch, name))
            self.record.save()
            self.report()

    def report(self) -> None:
        """Writes the table and the plot of the measurements so far."""
        write_report(self.record.path, markdown, draw)

    def row(self, model: Model, batch: int, name: str) -> dict[str, Any]:
        """Measures a row of the table if the time is sufficient."""
        system, shape, pairs = self.systems[name], model.shape, model.shape.batches[batch]
        status = self.usable[name]
        if status == OK and (self.record.seconds_left() <= 0 or model.needs(name, pairs) > self.record.seconds_left()):
            status = LATE
        result: dict[str, Any] = {"model": shape.name, "B": pairs, "system": name, "status": status}
        if result["status"] != OK:
            return result
        message = f"{shape.name} B = {pairs} {name}"
        try:
            self.prepare(model)
            self.measure(model, batch, name, result)
        except Exception as error:  # a library can fail in any way; the others are still measured
            result["status"] = failure(error)
        if result["status"] == OK:
            model.pace[name], model.tokens[system.library] = result["seconds"] / pairs, result["chunk_tokens"]
            peak = result["peak_bytes"] / 2**30
            message += f": {result['seconds']:.2f} s, {pairs / result['seconds']:.0f} pairs/s, {peak:.1f} GiB"
            self.record.say(f"{message}, loss {result['loss']:.4f}")
        else:
            self.record.say(f"{message}: {result['status']}")
        if model.encoder is not None:
            take_gradients(model.encoder)
        clear(self.device)
        return result

    def prepare(self, model: Model) -> None:
        """Builds the decoder if it does not exist yet."""
        if model.encoder is not None:
            return
        shape = model.shape
        model.encoder, model.trained_parameters = decoder(shape, self.device, half=shape.adapters and self.device == "cuda")
        self.record["models"][shape.name] = {
            "parameters": sum(p.numel() for p in model.encoder.parameters()),
            "trained_parameters": sum(p.numel() for p in model.encoder.parameters() if p.requires_grad),
            "trained": model.trained_parameters,
        }
        self.record.say(f"{shape.name}: {model.trained_parameters}")

    def measure(self, model: Model, batch: int, name: str, result: dict[str, Any]) -> None:
        """Measures a step with each chunk size to try, and keeps the fastest."""
        system, shape = self.systems[name], model.shape
        assert model.encoder is not None
        columns = self.texts(shape, shape.batches[batch], self.longest)
        result["tokens"] = sum(int(column["attention_mask"].sum()) for column in columns)
        known_tokens = model.tokens.get(system.library)
        measurements: dict[int, dict[str, Any]] = {}
        for tokens in shape.tokens if known_tokens is None else (known_tokens,):
            s = Setting(model.encoder, columns, tokens, self.device)
            try:
                if model.step(name, shape.batches[batch]) < WORTH_A_WARM_UP:
                    self.warm_up(f"{shape.name} {name}", system, s, first=not measurements and name not in model.pace)
                elif system.library == OURS_LIBRARY:
                    rehearse_loss(s)
                measurements[tokens] = self.step(system, s)
            except Exception:  # larger chunks would fail, too
                if not measurements:
                    raise
                break
        if known_tokens is None:
            times = ", ".join(f"{tokens}: {measurement['seconds']:.2f} s" for tokens, measurement in measurements.items())
            self.record.say(f"{shape.name} {name}, chunks of tokens {times}")
        result |= min(measurements.values(), key=lambda measurement: float(measurement["seconds"]))

    def warm_up(self, what: str, system: System, s: Setting, *, first: bool) -> None:
        """Runs a step of the same batch, which compiles kernels and requests memory.

        The first warm-up begins with documents, because the compiler chooses kernels for the first chunk, and queries have few
        tokens.
        """
        start, before = time.perf_counter(), compilations()
        system.prepare(s.encoder)
        if first and system.compiled:
            system(dataclasses.replace(s, columns=s.columns[::-1]))
        self.seconds(system, s)
        take_gradients(s.encoder)
        if compilations() > before:
            self.record.say(f"{what}: {compilations() - before} compilations, {time.perf_counter() - start:.0f} s")

    def step(self, system: System, s: Setting) -> dict[str, Any]:
        """Measures a step that compiles nothing. Returns its time, its loss, and its peak without weights and gradients."""
        result: dict[str, Any] = {"chunk_tokens": s.tokens}
        for _ in range(ATTEMPTS):
            take_gradients(s.encoder)
            system.prepare(s.encoder)
            for p in s.encoder.parameters():
                p.grad = torch.zeros_like(p) if p.requires_grad else None  # as in every step except the first
            before = compilations()
            result["seconds"], result["peak_bytes"] = peak_memory(lambda: self.seconds(system, s, result), self.device)
            if compilations() == before:
                return result
            self.record.say(
                f"a timed step had {compilations() - before} compilations and took {result['seconds']:.1f} s; it is timed again"
            )
        raise RuntimeError("every step compiles")

    def seconds(self, system: System, s: Setting, result: dict[str, Any] | None = None) -> float:
        """Returns the seconds of a step."""
        start = now(self.device)
        value = system(s)
        seconds = now(self.device) - start
        if result is not None:
            result["loss"] = value.item()
        return seconds


def rows_of(models: Sequence[Model], systems: Mapping[str, System] = SYSTEMS) -> list[tuple[Model, int, str]]:
    """Returns the rows of the table as (model, index of the batch, system), in the order of measurement."""
    return [
        (model, batch, name)
        for batch in range(max(len(model.shape.batches) for model in models))
        for model in models
        for name, system in systems.items()
        if batch < min(system.batches, len(model.shape.batches))
    ]


HEADINGS = ["model", "B", "system", "step, s", "pairs/s"]
HEADINGS += ["× best of sentence-transformers", "peak GiB"]
COLORS = (plots.GREEN, plots.ORANGE, plots.OCHRE, plots.MINT, plots.BLUE, plots.VIOLET, plots.GREY)


NEGATIVES = "Each pair has a hard negative, and all hard negatives are negatives of every query."
SMALL_MODEL = "a small decoder"


def markdown(record: dict[str, Any], what: str = NEGATIVES, checked: str = SMALL_MODEL) -> str:
    """Returns the Markdown of a record.

    Args:
        record: the record.
        what: a sentence about the batches.
        checked: the models that the plain step was computed with.
    """
    errors: dict[str, float] = {}
    for check in record["checks"]:
        errors[check["system"]] = max(errors.get(check["system"], 0.0), check.get("gradient_error", 0.0))
    rows = []
    models = _list_measured(record)
    results = sorted(  # they were measured batch by batch
        (r for r in record["results"] if r["model"] in models), key=lambda r: (models.index(r["model"]), r["B"])
    )
    for (model, B), group in groups(results, "model", "B").items():
        best = min((r["seconds"] for r in group if "seconds" in r and r["system"].startswith(THEIRS)), default=None)
        for r in group:
            seconds = r.get("seconds")
            cells = [
                model,
                f"{B:,}",
                r["system"],
                cell(seconds, ".2f") or r["status"],
                ratio(B, seconds, ".0f"),
                ratio(best, seconds),
            ]
            rows.append([*cells, gib(r.get("peak_bytes")), cell(r.get("loss"), ".4f"), cell(errors.get(r["system"]), ".0e")])
    models_in_words = "; ".join(
        f"{name}: {entry['parameters'] / 1e6:,.0f} M parameters, trained: {entry['trained']} "
        f"({entry['trained_parameters'] / 1e6:,.1f} M)"
        for name, entry in record["models"].items()
        if name in models
    )
    notes = (
        f"{models_in_words}. {what} Chunk sizes: the fastest of several sizes for each library. Peak: memory in addition to "
        f"weights and gradients. Gradient error: relative to a plain step of {checked} in float32."
    )
    return paragraphs(
        TextTable([*HEADINGS, "loss", "gradient error"], rows, names=(0, 2)).markdown(),
        f"{notes} {_describe_memory_per_pair(results)}".strip(),
    )


def _list_measured(record: dict[str, Any]) -> list[str]:
    """Returns the models that have a measurement, because a run can end before the last model."""
    return list(dict.fromkeys(r["model"] for r in record["results"] if "seconds" in r))


def _describe_memory_per_pair(results: list[dict[str, Any]]) -> str:
    """Returns the memory of one more pair, from the two largest batches. Smaller batches do not fill a chunk."""
    parts = []
    for (model, system), group in groups([r for r in results if "seconds" in r], "model", "system").items():
        largest = sorted(group, key=lambda r: r["B"])[-2:]
        if len(largest) == 2:
            few, many = largest
            each = (many["peak_bytes"] - few["peak_bytes"]) / (many["B"] - few["B"])
            parts.append(f"{model}, {system}: {each / 2**10:,.0f} KiB")
    return f"Memory of one more pair, between the two largest batches: {'; '.join(parts)}." if parts else ""


def draw(record: dict[str, Any], title: str = "One step with hard negatives") -> Any:
    """Draws the speed of each model against the batch size."""
    models = _list_measured(record)
    if not models:
        return None
    figure, panels = plots.panels(f"{title}; {chip(record)}", len(models))
    for axes, model in zip(panels, models, strict=True):
        rows = [r for r in record["results"] if r["model"] == model]
        for name, color in zip(dict.fromkeys(r["system"] for r in rows), COLORS, strict=False):
            points = sorted((r["B"], r["B"] / r["seconds"]) for r in rows if r["system"] == name and "seconds" in r)
            plots.line(axes, points, name, color)
        axes.set_ylabel(f"pairs per second, {model}")
        plots.batch_axis(axes, [r["B"] for r in rows])
        axes.set_ylim(0, None)
        plots.label_lines(axes)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="*", default=["0.6B", "8B"], choices=["0.6B", "8B"], help="models to measure (default: both)"
    )
    parser.add_argument("--peers", type=Path, help="folder with further packages, such as PEFT")
    arguments(parser, "decoders_gpu", 400)
    args = parser.parse_args()
    if args.peers is not None:
        sys.path.append(str(args.peers))
    bench = Bench(args)
    bench.check()
    bench.run(TINY if args.tiny else [{"0.6B": SMALL, "8B": LARGE}[name] for name in args.models])
    bench.record.finish(markdown, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())

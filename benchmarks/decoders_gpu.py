"""Decoders as encoders of texts, Qwen3-0.6B and Qwen3-8B by shape: our cached step against sentence-transformers' cached loss.

The decoders have random weights and pool the last token. Texts are random tokens of lognormal lengths: queries, documents, and
one hard negative for each query. The 0.6B is trained whole, in float32 under bf16 autocast. The 8B is in bf16 and is trained by
LoRA; without PEFT (`--peers FOLDER` names a folder that has it), its last layers are trained.

Before anything is timed, the gradients of every system are compared with a plain step's, in float32 with a small decoder.
The first system of each library tries several chunk sizes on the smallest batch, and all of its systems use the best one.
Layers are compiled where a system says so. A timed step has compiled nothing; else it is timed again.
"""

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
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
from megabatch_train.towers.huggingface import TextEncoder

CHECK, CHECK_TOKENS, TOLERANCE = 12, 200, 1e-3  # float32 against float32, by the length of all gradients


WORTH_A_WARM_UP = 10.0  # seconds: longer steps are timed at once, and again if they compiled
ATTEMPTS = 2


@dataclass(eq=False)
class Model:
    """A decoder, and the numbers that later rows need."""

    shape: Shape
    encoder: TextEncoder | None = None
    trained_parameters: str = ""
    tokens: dict[str, int] = field(default_factory=dict)  # of a chunk, by library
    pace: dict[str, float] = field(default_factory=dict)  # seconds of a pair, by system

    def step(self, name: str, pairs: int) -> float:
        """Seconds that a step will take, by the last one; 0 if there is none."""
        return self.pace.get(name, 0.0) * pairs

    def needs(self, name: str, pairs: int) -> float:
        """Seconds that a row will take, with its warm-up and some more."""
        return 1.2 * self.step(name, pairs) * (2 if self.step(name, pairs) < WORTH_A_WARM_UP else 1)


class Bench:
    """The measurements of all shapes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, device_of(args)
        self.record = Record.of_script("decoders_gpu", args, args.seconds, checks=[], models={})
        self.usable = dict.fromkeys(SYSTEMS, OK)
        self.longest = 64 if args.tiny else LONGEST

    def check(self) -> None:
        """Gradients of every system that is not compiled against the plain step's, whole and with adapters."""
        for shape in TINY:
            encoder, trained = decoder(shape, self.device, half=False)
            s = Setting(
                encoder, texts(CHECK, shape.config["vocab_size"], self.device, 64), CHECK_TOKENS, self.device, autocast=False
            )
            encoder.pad()
            plain(s)
            wanted = take_gradients(encoder)
            for name, step in SYSTEMS.items():
                if name in WITH_COMPILER or self.usable[name] != OK:
                    continue
                result: dict[str, Any] = {"system": name, "trained": trained, "status": OK}
                try:
                    step.prepare(encoder)
                    step(s)
                    result["gradient_error"] = relative_error(take_gradients(encoder), wanted)
                    result["status"] = OK if result["gradient_error"] <= TOLERANCE else WRONG
                except Exception as error:  # a library may fail in any way; the others are still measured
                    result["status"] = failure(error)
                self.usable[name] = result["status"]
                self.record["checks"].append(result)
                self.record.say(f"{name}, {trained}: {result['status']}, {result.get('gradient_error', math.nan):.1e}")
                take_gradients(encoder)
        for name, same in WITH_COMPILER.items():
            self.usable[name] = self.usable[same] if self.device == "cuda" else "only on a GPU"

    def run(self, shapes: Sequence[Shape]) -> None:
        """The smallest batch of all models first, each with a report."""
        for model, batch, name in rows_of([Model(shape) for shape in shapes]):
            self.record["results"].append(self.row(model, batch, name))
            self.record.save()
            write_report(self.record.path, markdown, draw)

    def row(self, model: Model, batch: int, name: str) -> dict[str, Any]:
        """One row of the table, if there is time for it."""
        system, shape, pairs = SYSTEMS[name], model.shape, model.shape.batches[batch]
        status = self.usable[name]
        if status == OK and (self.record.seconds_left() <= 0 or model.needs(name, pairs) > self.record.seconds_left()):
            status = LATE
        result: dict[str, Any] = {"model": shape.name, "B": pairs, "system": name, "status": status}
        if result["status"] != OK:
            return result
        told = f"{shape.name} B = {pairs} {name}"
        try:
            self.prepare(model)
            self.measure(model, batch, name, result)
        except Exception as error:  # a library may fail in any way; the others are still measured
            result["status"] = failure(error)
        if result["status"] == OK:
            model.pace[name], model.tokens[system.library] = result["seconds"] / pairs, result["chunk_tokens"]
            peak = result["peak_bytes"] / 2**30
            told += f": {result['seconds']:.2f} s, {pairs / result['seconds']:.0f} pairs/s, {peak:.1f} GiB"
            self.record.say(f"{told}, loss {result['loss']:.4f}")
        else:
            self.record.say(f"{told}: {result['status']}")
        if model.encoder is not None:
            take_gradients(model.encoder)
        clear(self.device)
        return result

    def prepare(self, model: Model) -> None:
        """Makes the decoder, when it is first needed."""
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
        """The fastest step of those with the chunk sizes in question."""
        system, shape = SYSTEMS[name], model.shape
        assert model.encoder is not None
        columns = texts(shape.batches[batch], shape.config["vocab_size"], self.device, self.longest)
        result["tokens"] = sum(int(column["attention_mask"].sum()) for column in columns)
        known = model.tokens.get(system.library)
        tried: dict[int, dict[str, Any]] = {}
        for tokens in shape.tokens if known is None else (known,):
            s = Setting(model.encoder, columns, tokens, self.device)
            try:
                if model.step(name, shape.batches[batch]) < WORTH_A_WARM_UP:
                    self.warm_up(f"{shape.name} {name}", system, s, first=not tried and name not in model.pace)
                elif system.library == OURS_LIBRARY:
                    rehearse_loss(s)
                tried[tokens] = self.step(system, s)
            except Exception:  # larger chunks would fail too
                if not tried:
                    raise
                break
        if known is None:
            times = ", ".join(f"{tokens}: {found['seconds']:.2f} s" for tokens, found in tried.items())
            self.record.say(f"{shape.name} {name}, chunks of tokens {times}")
        result |= min(tried.values(), key=lambda found: float(found["seconds"]))

    def warm_up(self, what: str, system: System, s: Setting, *, first: bool) -> None:
        """A step of the same batch, which compiles kernels and requests memory.

        The very first one begins with documents, because the compiler chooses kernels by the first chunk that it sees, and
        queries are few tokens.
        """
        begun, before = time.perf_counter(), compilations()
        system.prepare(s.encoder)
        if first and system.compiled:
            system(dataclasses.replace(s, columns=s.columns[::-1]))
        self.seconds(system, s)
        take_gradients(s.encoder)
        if compilations() > before:
            self.record.say(f"{what}: {compilations() - before} compilations, {time.perf_counter() - begun:.0f} s")

    def step(self, system: System, s: Setting) -> dict[str, Any]:
        """A step that compiles nothing: its time, its peak beyond weights and gradients, its loss."""
        found: dict[str, Any] = {"chunk_tokens": s.tokens}
        for _ in range(ATTEMPTS):
            take_gradients(s.encoder)
            system.prepare(s.encoder)
            for p in s.encoder.parameters():
                p.grad = torch.zeros_like(p) if p.requires_grad else None  # as in every step but the first
            before = compilations()
            found["seconds"], found["peak_bytes"] = peak_memory(lambda: self.seconds(system, s, found), self.device)
            if compilations() == before:
                return found
            self.record.say(f"a timed step had {compilations() - before} compilations, {found['seconds']:.1f} s; once more")
        raise RuntimeError("compiles in every step")

    def seconds(self, system: System, s: Setting, found: dict[str, Any] | None = None) -> float:
        """Of one step."""
        begun = now(self.device)
        value = system(s)
        seconds = now(self.device) - begun
        if found is not None:
            found["loss"] = value.item()
        return seconds


def rows_of(models: Sequence[Model]) -> list[tuple[Model, int, str]]:
    """Rows of the table in the order of measurement: (model, number of the batch, system)."""
    return [
        (model, batch, name)
        for batch in range(max(len(model.shape.batches) for model in models))
        for model in models
        for name, system in SYSTEMS.items()
        if batch < min(system.batches, len(model.shape.batches))
    ]


HEADINGS = ["model", "B", "system", "step, s", "pairs/s"]
HEADINGS += ["× best of sentence-transformers", "peak GiB"]
COLOURS = (plots.GREEN, plots.ORANGE, plots.OCHRE, plots.MINT, plots.BLUE, plots.VIOLET, plots.GREY)


def markdown(record: dict[str, Any]) -> str:
    """Markdown."""
    errors: dict[str, float] = {}
    for check in record["checks"]:
        errors[check["system"]] = max(errors.get(check["system"], 0.0), check.get("gradient_error", 0.0))
    rows = []
    models = _measured(record)
    results = sorted(  # measured batch by batch
        (r for r in record["results"] if r["model"] in models), key=lambda r: (models.index(r["model"]), r["B"])
    )
    for (model, B), group in groups(results, "model", "B").items():
        best = min((r["seconds"] for r in group if "seconds" in r and r["system"].startswith(THEIRS)), default=None)
        for r in group:
            took = r.get("seconds")
            cells = [model, f"{B:,}", r["system"], cell(took, ".2f") or r["status"], ratio(B, took, ".0f"), ratio(best, took)]
            rows.append([*cells, gib(r.get("peak_bytes")), cell(r.get("loss"), ".4f"), cell(errors.get(r["system"]), ".0e")])
    trained = "; ".join(
        f"{name}: {about['parameters'] / 1e6:,.0f} M parameters, trained: {about['trained']} "
        f"({about['trained_parameters'] / 1e6:,.1f} M)"
        for name, about in record["models"].items()
        if name in models
    )
    about = (
        f"{trained}. Each pair has a hard negative; all of them are negatives of every query. Chunks: the fastest of several "
        "sizes for each system. Peak: memory beyond weights and gradients. Gradient error: relative to a plain step of a small "
        "decoder in float32."
    )
    return paragraphs(
        TextTable([*HEADINGS, "loss", "gradient error"], rows, names=(0, 2)).markdown(),
        f"{about} {_largest(results)}".strip(),
    )


def _measured(record: dict[str, Any]) -> list[str]:
    """The models with a measurement; a run may end before the last of them."""
    return list(dict.fromkeys(r["model"] for r in record["results"] if "seconds" in r))


def _largest(results: list[dict[str, Any]]) -> str:
    """What a further pair costs in memory, by the two largest batches of each system. Smaller ones do not fill a chunk."""
    said = []
    for (model, system), group in groups([r for r in results if "seconds" in r], "model", "system").items():
        largest = sorted(group, key=lambda r: r["B"])[-2:]
        if len(largest) == 2:
            few, many = largest
            each = (many["peak_bytes"] - few["peak_bytes"]) / (many["B"] - few["B"])
            said.append(f"{model}, {system}: {each / 2**10:,.0f} KiB")
    return f"Memory of one pair more, between the two largest batches: {'; '.join(said)}." if said else ""


def draw(record: dict[str, Any]) -> Any:
    """Speed of each model against the batch."""
    models = _measured(record)
    if not models:
        return None
    figure, panels = plots.panels(f"One step with hard negatives; {chip(record)}", len(models))
    for axes, model in zip(panels, models, strict=True):
        rows = [r for r in record["results"] if r["model"] == model]
        for name, colour in zip(dict.fromkeys(r["system"] for r in rows), COLOURS, strict=False):
            points = sorted((r["B"], r["B"] / r["seconds"]) for r in rows if r["system"] == name and "seconds" in r)
            plots.line(axes, points, name, colour)
        axes.set_ylabel(f"pairs a second, {model}")
        plots.batch_axis(axes, [r["B"] for r in rows])
        axes.set_ylim(0, None)
        plots.label_lines(axes)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["0.6B", "8B"], choices=["0.6B", "8B"], help="both by default")
    parser.add_argument("--peers", type=Path, help="folder of packages, such as PEFT")
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

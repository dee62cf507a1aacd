"""The runs of `image_study.py`: which settings each part tries, given the lines of the parts before."""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from flickr8k_data import HELD_OUT
from image_study_report import mean_recall

from megabatch.bench.loss_systems import DENSE, INF_CL, MEGABATCH

SIGLIP = "siglip"
BASE, SIZES = 1024, [256, 1024, 4096, 8192, 16384, 32768]
RULES = ("none", "sqrt", "linear")  # `optimizer.scaling`
TOWERS = ("conv1@64", "conv1@96")  # residual blocks of a stage at pixels of a side; "64/8": pixels / of a patch
CROPS = ((0.9, False), (0.4, True))  # least share of the area, and whether half of the images are mirrored
FIRST_RATE, RATES = 1e-3, (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
NEARLY = 0.97  # of the best mean recall: the smallest such rate is taken, because two rules make it larger
TRIAL = 1000  # the seed of choices, which the study does not use
EQUAL_STEPS_OF = 4096  # pairs
SIGLIP_SIZES = (1024, 8192)


class Setting(NamedTuple):
    """One run."""

    tower: str
    area: float
    flip: bool
    batch_size: int
    lr: float  # at `BASE` pairs
    rule: str
    steps: int
    seed: int
    loss: str = MEGABATCH
    ids: bool = True


class Sizes(NamedTuple):
    """What a tiny run has smaller."""

    layers: tuple[int, int] = (4, 2)  # transformer layers of images, unless they are convolved, and of texts
    width: int = 256
    base: int = BASE
    sizes: Sequence[int] = SIZES
    samples: int = 1 << 20  # of the cheapest tower; others see fewer
    equal_steps_of: int = EQUAL_STEPS_OF
    siglip: Sequence[int] = SIGLIP_SIZES
    towers: Sequence[str] = TOWERS
    rates: Sequence[float] = RATES
    held_out: int = HELD_OUT


TINY = Sizes((1, 1), 32, 16, (16, 64), 256, 16, (16,), ("conv1@32", "32/16"), (1e-3, 2e-3), 12)


def samples_of(tower: str, sizes: Sizes) -> int:
    """Pairs that a run of this tower sees: all convolutional towers get the same number of operations, by blocks and pixels."""
    if not tower.startswith("conv"):
        return sizes.samples
    cheapest = min(_cost(name) for name in sizes.towers if name.startswith("conv"))
    largest = max(*sizes.sizes, sizes.base)
    return max(1, int(sizes.samples * cheapest / _cost(tower)) // largest) * largest


def _cost(tower: str) -> int:
    """Of an image in convolutions, relative to other towers."""
    blocks, pixels = map(int, tower.removeprefix("conv").split("@"))
    return blocks * pixels**2


def wanted(part: str, lines: list[dict[str, Any]], sizes: Sizes, options: argparse.Namespace) -> list[Setting]:
    """The runs of a part; earlier parts have chosen tower, crops and rate."""
    if part == "choose":
        return [
            Setting(name, *crop, sizes.base, FIRST_RATE, "none", samples_of(name, sizes) // sizes.base, TRIAL)
            for crop in CROPS
            for name in sizes.towers
        ]
    chosen = best(part, "choose", lines, wanted("choose", lines, sizes, options))
    if part == "rate":
        return [chosen._replace(lr=rate) for rate in sizes.rates]
    tried = [line for line in lines if setting(line) in wanted("rate", lines, sizes, options)]
    if options.lr is None and len({line["lr"] for line in tried}) < len(sizes.rates):
        raise SystemExit(f"{part} needs the results of rate, or --lr")
    most = max((mean_recall(line) for line in tried), default=0.0)
    rate = options.lr or min(line["lr"] for line in tried if mean_recall(line) >= NEARLY * most)
    base, samples = chosen._replace(lr=rate), samples_of(chosen.tower, sizes)
    if part == "study":
        smallest, *larger = sorted(options.sizes or sizes.sizes)
        order = [(smallest, seed) for seed in options.seeds]  # first: they have most steps, and keep the host busy, not the GPU
        order += [(size, seed) for seed in options.seeds for size in larger]
        return [
            base._replace(batch_size=size, rule=rule, steps=samples // size, seed=seed)
            for size, seed in order
            for rule in (("none",) if size == sizes.base else RULES)  # there the rules agree
        ]
    study = [line for line in lines if setting(line) in set(wanted("study", lines, sizes, options))]

    def of(size: int) -> Setting:
        """The best rule of a batch size, by the mean over its seeds so far."""
        known: dict[str, list[float]] = {}
        for line in study:
            if line["batch_size"] == size:
                known.setdefault(line["rule"], []).append(mean_recall(line))
        untried = "none" if size == sizes.base else "sqrt"
        rule = max(known, key=lambda name: sum(known[name]) / len(known[name]), default=untried)
        return base._replace(batch_size=size, rule=rule, steps=samples // size)

    if part == "steps":
        steps, larger = samples // sizes.equal_steps_of, [size for size in sizes.sizes if size > sizes.equal_steps_of]
        return [of(size)._replace(steps=steps, seed=seed) for seed in options.seeds for size in sorted(larger, reverse=True)]
    if part == "losses":
        return [
            of(sizes.equal_steps_of)._replace(seed=seed, loss=loss, ids=False)
            for seed in options.seeds
            for loss in (MEGABATCH, DENSE, INF_CL)
        ]
    return [of(size)._replace(seed=seed, loss=SIGLIP) for seed in options.seeds for size in sizes.siglip]


def best(part: str, before: str, lines: list[dict[str, Any]], candidates: list[Setting]) -> Setting:
    """The candidate with the best recall."""
    known = [line for line in lines if setting(line) in candidates]
    if not known:
        raise SystemExit(f"{part} needs the results of {before}")
    return setting(max(known, key=mean_recall))


def setting(line: dict[str, Any]) -> Setting:
    """The run that a line is of."""
    return Setting(*(line[name] for name in Setting._fields))

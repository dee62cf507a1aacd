"""The table by which a loss takes its path: every call has a rule, and the rules have the sizes that were measured."""

import argparse
import itertools
from pathlib import Path

import pytest
import torch

import megabatch as mb
from megabatch import dispatch
from megabatch.dispatch import BOTH, DENSE, FUSED, KINDS, LABELS, ROWS, SIGMOID, TWO_PASS, VIEWS
from megabatch_train.commands import small

SIZES = (0, 1, 2, 2048, 2049, 4096, 4097, 8192, 8193, 32768, 32769, 65536, 65537, 2**22)


@pytest.mark.parametrize(
    ("kind", "engine", "rows", "D", "path", "module"),
    [
        (BOTH, "eager", 2048, 512, DENSE, "dense"),
        (BOTH, "eager", 2049, 512, FUSED, "fused"),
        (ROWS, "eager", 4096, 512, DENSE, "dense"),
        (ROWS, "eager", 4097, 512, FUSED, "fused"),
        (SIGMOID, "eager", 2049, 512, FUSED, "fused"),
        (BOTH, "triton", 1, 512, FUSED, "fused"),
        (BOTH, "triton", 8192, 512, DENSE, "dense"),
        (BOTH, "triton", 8193, 512, FUSED, "one_gpu"),
        (BOTH, "triton", 65536, 2048, FUSED, "one_gpu"),
        (BOTH, "triton", 65536, 2049, FUSED, "fused"),
        (BOTH, "triton", 65537, 512, FUSED, "fused"),
        (SIGMOID, "triton", 65536, 512, FUSED, "one_gpu"),
        (SIGMOID, "triton", 65537, 512, FUSED, "fused"),
        (VIEWS, "triton", 32768, 512, FUSED, "one_gpu"),
        (VIEWS, "triton", 32769, 512, FUSED, "fused"),
        (LABELS, "triton", 8192, 512, DENSE, "dense"),
        (LABELS, "triton", 16384, 512, FUSED, "one_gpu"),
        (LABELS, "triton", 16385, 512, FUSED, "fused"),
    ],
)
def test_sizes(kind, engine, rows, D, path, module):
    rule = dispatch.find_rule(kind, rows, D, engine, on_cpu=engine == "eager")
    assert (rule.path, rule.module) == (path, module)


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_has_a_rule(kind):
    for engine, rows, on_cpu in itertools.product(("eager", "triton"), SIZES, (True, False)):
        rule = dispatch.find_rule(kind, rows, 512, engine, on_cpu=on_cpu)
        assert kind in rule.kinds
        assert rule.engine in ("", engine)
        assert rule.standard
    assert dispatch.RULES[-1] == dispatch.Rule(TWO_PASS, "", KINDS, standard=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["eager", "triton"])
def test_a_group_excludes_rules_for_one_process(kind, engine):
    x = torch.zeros(64, 8)
    assert dispatch.choose_module(kind, x, engine, "a group", "mean") == "fused"
    assert dispatch.choose_module(kind, x, engine, "a group", "sum") == ""  # each rank has a gradient of its own
    assert dispatch.choose_module(kind, x, engine, "", "none") == ""
    assert dispatch.choose_module(kind, x, engine, "", "sum", standard=False) == ""
    assert dispatch.choose_module(kind, x, engine, "", "sum") == "dense"


def test_views_are_two_rows_of_each_sample():
    with dispatch.override(dense_cpu=64):
        assert dispatch.choose_module(VIEWS, torch.zeros(32, 8), "eager", "", "mean") == "dense"
        assert dispatch.choose_module(VIEWS, torch.zeros(33, 8), "eager", "", "mean") == "fused"


def test_transforms_take_the_fused_operators():
    chosen = []

    def loss(x):
        chosen.append(dispatch.choose_module(BOTH, x, "eager", "", "mean"))
        return mb.clip_loss(x, x, 1.0)

    torch.func.grad(loss)(torch.ones(4, 2))
    assert chosen == ["fused"]


def test_an_override_ends_with_its_block():
    usual = dispatch.limits()
    with dispatch.override(dense_triton=7):
        assert dispatch.limits().dense_triton == 7
        assert dispatch.find_rule(BOTH, 8, 4, "triton").path == FUSED
    with pytest.raises(KeyError), dispatch.override(dense_triton=7):
        raise KeyError
    assert dispatch.limits() == usual
    assert dispatch.find_rule(BOTH, 8, 4, "triton").path == DENSE
    with pytest.raises(TypeError, match="dense_gpu"), dispatch.override(dense_gpu=7):
        pass


def test_info_prints_every_rule(capsys):
    assert small.run_info(argparse.Namespace(json=False)) == 0
    printed = capsys.readouterr().out
    for path, *_, size, _ in dispatch.describe_rules():
        assert any(path in line and size in line for line in printed.splitlines())


def test_the_page_shows_the_rules():
    """docs/architecture.md contains the table; `small.describe_paths().markdown()` is its source."""
    page = Path(__file__).parents[1] / "docs" / "architecture.md"
    assert small.describe_paths().markdown() in page.read_text("utf-8")

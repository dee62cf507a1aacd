"""Optimizers, parameter groups, learning rates: against formulas written out."""

import itertools
import math

import pytest
import torch
from torch import nn

from megabatch_train.trainer import build
from megabatch_train.trainer import config as configs
from megabatch_train.trainer.config import LossConfig, OptimizerConfig, ScheduleConfig
from megabatch_train.trainer.loss import Objective


def adafactor(parameter, lr=0.01, momentum=0.9, weight_decay=0.0):
    pytest.importorskip("timm", reason="AdaFactor comes with timm")
    config = OptimizerConfig("adafactor", lr=lr, betas=(momentum, 0.98))
    return build.build_optimizer(config, [{"params": [parameter], "weight_decay": weight_decay}])


def plain_adafactor(parameter, gradients, *, lr, momentum, weight_decay):
    """The formulas in float64 with loops, for a matrix or anything that is not factored; momentum in bfloat16."""
    p = parameter.double().clone()
    rows = columns = second = 0.0
    first = torch.zeros_like(p, dtype=torch.bfloat16)
    for t, g in enumerate(gradients, 1):
        beta = min(1 - t**-0.8, 0.999)
        square = g.double() ** 2 + 1e-30
        if p.dim() == 2 and min(p.shape) >= 32:
            rows = beta * rows + (1 - beta) * square.mean(1, keepdim=True)
            columns = beta * columns + (1 - beta) * square.mean(0, keepdim=True)
            moment = rows * columns / rows.mean()
        else:
            moment = second = beta * second + (1 - beta) * square
        change = g.double() / moment.sqrt()
        if momentum:
            first = first.lerp(change.bfloat16(), 1 - momentum)
            change = first.double()
        p -= lr * (change + weight_decay * p)
    return p


@pytest.mark.parametrize("shape", [(32, 48), (48, 32), (31, 64), (7,), (), (1, 40)])
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.9, 0.1), (0.0, 0.0)])
def test_adafactor_is_its_formulas(shape, momentum, weight_decay):
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(shape, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** (-k) for k in range(6)]
    wanted = plain_adafactor(start, gradients, lr=0.01, momentum=momentum, weight_decay=weight_decay)
    parameter = nn.Parameter(start.clone())
    optimizer = adafactor(parameter, 0.01, momentum, weight_decay)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-12, atol=1e-12)


def test_adafactor_factors_the_two_longest_dimensions_and_survives_zeros():
    parameter = nn.Parameter(torch.randn(64, 40, 3, 3))
    optimizer = adafactor(parameter)
    before = parameter.detach().clone()
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(parameter, before)
    state = optimizer.state[parameter]
    assert state["exp_avg_sq_r"].shape == (1, 40, 3, 3)
    assert state["exp_avg_sq_c"].shape == (64, 1, 3, 3)
    assert state["exp_avg"].dtype == torch.bfloat16
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert parameter.isfinite().all()
    # A second moment that has the form rows × columns is kept without loss.
    exact = nn.Parameter(torch.zeros(33, 50, dtype=torch.float64))
    exact.grad = (torch.rand(33, 1, dtype=torch.float64) + 1) * (torch.rand(1, 50, dtype=torch.float64) + 1)
    adafactor(exact, lr=1.0, momentum=0.0).step()
    torch.testing.assert_close(exact.detach(), -torch.ones_like(exact))


def sharded(group, rank, shape, dim, steps):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    start, gradients = numbers(shape, steps)
    parameter = nn.Parameter(distribute_tensor(start, mesh, [Shard(dim)]))
    optimizer = adafactor(parameter, weight_decay=0.1)
    for gradient in gradients:
        parameter.grad = distribute_tensor(gradient, mesh, [Shard(dim)])
        optimizer.step()
    kept = [value for value in optimizer.state[parameter].values() if hasattr(value, "placements")]
    assert kept
    assert not any(place.is_partial() for value in kept for place in value.placements)  # a checkpoint could not hold it
    return parameter.detach().full_tensor()


def numbers(shape, steps):
    generator = torch.Generator().manual_seed(1)
    start, *gradients = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps + 1))
    return start, gradients


@pytest.mark.parametrize(("shape", "dim"), [((33, 50), 0), ((50, 33), 0), ((40, 35), 1), ((32, 64, 3), 0), ((7, 3), 0)])
def test_adafactor_of_a_sharded_parameter_is_that_of_the_whole(pool, shape, dim):
    start, gradients = numbers(shape, 3)
    parameter = nn.Parameter(start.clone())
    optimizer = adafactor(parameter, weight_decay=0.1)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    for found in pool.run(sharded, 2, shape, dim, 3):
        torch.testing.assert_close(found, parameter.detach(), rtol=1e-12, atol=1e-12)


def test_adafactor_continues_with_the_same_bits_and_types():
    def made():
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(40, 40))
        return parameter, adafactor(parameter, lr=0.1)

    def step(parameter, optimizer, seed):
        parameter.grad = torch.randn(40, 40, generator=torch.Generator().manual_seed(seed))
        optimizer.step()

    (whole, first), (half, second), (rest, third) = made(), made(), made()
    for seed in range(4):
        step(whole, first, seed)
    for seed in range(2):
        step(half, second, seed)
    rest.data.copy_(half.data)
    third.load_state_dict(second.state_dict())
    assert third.state[rest]["exp_avg"].dtype == torch.bfloat16
    for seed in range(2, 4):
        step(rest, third, seed)
    assert torch.equal(rest, whole)


class Odd(nn.Module):
    """What has two dimensions and should not decay, and what is shared, frozen, or of a norm."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shared = self.linear
        self.norm = nn.LayerNorm((3, 4))  # its weight is a matrix
        self.batch_norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.table = nn.Embedding(5, 4)
        self.pair_bias = nn.Parameter(torch.zeros(2, 2))


def test_weight_decay_spares_norms_biases_and_the_scale():
    model, loss = Odd(), Objective(LossConfig("siglip"), 10.0, None)
    decaying, sparing, of_loss = build.parameter_groups([model, model], loss, 0.3)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert sorted(names[id(p)] for p in decaying["params"]) == ["linear.weight", "table.weight"]
    assert sorted(names[id(p)] for p in sparing["params"]) == [
        "batch_norm.bias",
        "batch_norm.weight",
        "linear.bias",
        "norm.bias",
        "norm.weight",
        "pair_bias",
    ]
    assert {id(p) for p in of_loss["params"]} == {id(loss.log_scale), id(loss.bias)}
    assert [group["weight_decay"] for group in (decaying, sparing, of_loss)] == [0.3, 0.0, 0.0]


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor", "lion"])
def test_every_optimizer_by_its_name(name):
    if name != "adamw":
        pytest.importorskip("timm", reason="Muon, Lion and AdaFactor come with timm")
    model, loss = Odd(), Objective(LossConfig(), 10.0, None)
    optimizer = build.build_optimizer(OptimizerConfig(name), build.parameter_groups([model], loss, 0.1))
    before = model.linear.weight.detach().clone()
    (model.linear(torch.ones(1, 4)).sum() * loss.log_scale).backward()
    optimizer.step()
    assert not torch.equal(model.linear.weight, before)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0, 0.0]


class Layers(nn.Module):
    """A tower with two equal layers, and parameters before and after them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 4, bias=False)
        self.embedding = nn.Embedding(5, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2))

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


def names_of(module, group):
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return sorted(names[id(parameter)] for parameter in group["params"])


def test_muon_makes_updates_of_layers_orthogonal_and_adamw_does_the_rest():
    pytest.importorskip("timm", reason="Muon comes with timm")
    torch.manual_seed(0)
    module, loss = Layers().double(), Objective(LossConfig(), 10.0, None)
    groups = build.parameter_groups([module], loss, 0.5, muon=True)
    assert [names_of(module, group) for group in groups[:3]] == [
        ["blocks.0.0.weight", "blocks.1.0.weight"],
        ["embedding.weight", "head.weight"],
        ["blocks.0.0.bias", "blocks.0.1.bias", "blocks.0.1.weight", "blocks.1.0.bias", "blocks.1.1.bias", "blocks.1.1.weight"],
    ]
    config = OptimizerConfig("muon", lr=0.01, betas=(0.8, 0.9), eps=1e-3)
    optimizer = build.build_optimizer(config, groups)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for name, parameter in module.named_parameters():
        decay = 0.5 if name in ("embedding.weight", "head.weight") or name.endswith(".0.weight") else 0.0
        change = (before[name] * (1 - 0.01 * decay) - parameter.detach()) / 0.01
        if name in ("blocks.0.0.weight", "blocks.1.0.weight"):
            # Five Newton-Schulz steps bring singular values near 1, and 0.2 · √8 is the size of AdamW's update.
            values = torch.linalg.svdvals(change / (0.2 * 8**0.5))
            assert values.min() > 0.5
            assert values.max() < 1.3
        else:
            gradient = parameter.grad
            torch.testing.assert_close(change, gradient / (gradient.abs() + 1e-3), rtol=1e-6, atol=1e-6)


def test_layers_nearer_to_the_input_have_smaller_rates():
    module = Layers()
    used = {id(parameter) for parameter in module.parameters()}
    scales = build.layer_scales(module, [used, used], 0.5)
    first, second = (
        {f"blocks.{layer}.{name}": scale for name in ("0.weight", "0.bias", "1.weight", "1.bias")}
        for layer, scale in ((0, 0.25), (1, 0.5))
    )
    assert scales == {"head.weight": 1.0, "embedding.weight": 0.125, **first, **second}
    groups = build.parameter_groups([module], nn.Identity(), 0.1, scales=[scales])
    found = {name: group.get(build.RATE_SCALE, 1.0) for group in groups for name in names_of(module, group)}
    assert found == scales
    decayed = {name for group in groups if group["weight_decay"] for name in names_of(module, group)}
    assert decayed == {"blocks.0.0.weight", "blocks.1.0.weight", "embedding.weight", "head.weight"}
    with pytest.raises(
        ValueError, match=r"optimizer.layer_decay must be 1 for a tower without repeated layers \(Odd\), got 0.5"
    ):
        build.layer_scales(Odd(), [set()], 0.5)


def test_timm_that_averages_wrongly_is_refused(monkeypatch):
    pytest.importorskip("timm", reason="AdaFactor comes with timm")
    monkeypatch.setattr(build, "version", lambda name: "1.0.28")
    with pytest.raises(
        ImportError, match=r"AdaFactor needs timm 1\.0\.29 or later, got 1\.0\.28; pip install \"timm>=1\.0\.29\""
    ):
        adafactor(nn.Parameter(torch.zeros(2, 2)))


def test_learning_rates_by_batch_size():
    for scaling, wanted in (("none", 1e-3), ("sqrt", 4e-3), ("linear", 16e-3)):
        config = OptimizerConfig(lr=1e-3, scaling=scaling, reference_batch=1024)
        assert configs.scale_rate(config, 16384) == pytest.approx(wanted)
        assert configs.scale_rate(config, 1024) == 1e-3
    for wrong in (
        {"layer_decay": 0.0},
        {"layer_decay": 1.5},
        {"lr": 0.0},
        {"lr": math.nan},
        {"betas": (0.9, 1.0)},
        {"weight_decay": -1.0},
        {"reference_batch": 0},
    ):
        with pytest.raises(ValueError, match=rf"optimizer.{next(iter(wrong))} must be"):
            OptimizerConfig(**wrong)


def test_the_default_warm_up_is_a_tenth_of_the_run_but_at_least_fifty_steps_or_half_of_it():
    found = {steps: ScheduleConfig().warm_up(steps) for steps in (1, 14, 60, 100, 415, 1000, 32000)}
    assert found == {1: 0, 14: 7, 60: 30, 100: 50, 415: 50, 1000: 100, 32000: 3200}
    assert ScheduleConfig(warmup_steps=7).warm_up(1000) == 7
    assert ScheduleConfig(warmup_fraction=0.01).warm_up(1000) == 10


def test_the_default_rate_never_rises_by_more_than_a_transformer_survives():
    """A run of 104 steps rose to 5e-4 within 10 steps, and the embeddings collapsed."""
    config, schedule = OptimizerConfig(), ScheduleConfig()
    for steps in (1, 2, 14, 30, 104, 1000, 10000):
        highest = configs.highest_rate(config, schedule, 4096, steps)
        rates = [0.0, *(configs.learning_rate(schedule, highest, step, steps) for step in range(steps))]
        assert max(later - earlier for earlier, later in itertools.pairwise(rates)) <= configs.STEEPEST_RISE * (1 + 1e-9)
        assert highest == pytest.approx(min(5e-4, 5e-6 * max(1, schedule.warm_up(steps))))
    assert configs.highest_rate(config, ScheduleConfig(warmup_steps=10), 4096, 1000) == pytest.approx(5e-5)
    assert configs.highest_rate(OptimizerConfig(lr=5e-4), ScheduleConfig(warmup_steps=10), 4096, 1000) == 5e-4  # as asked


def test_schedules():
    def rates(steps, **config):
        return [configs.learning_rate(ScheduleConfig(**config), 2.0, step, steps) for step in range(steps)]

    assert rates(4, name="constant", warmup_steps=0) == [2.0] * 4
    assert rates(6, name="constant", warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates(8, name="constant", warmup_fraction=0.5)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    cosine = rates(10, warmup_steps=2)
    assert cosine[:3] == [1.0, 2.0, 2.0]
    assert cosine[6] == pytest.approx(1.0)  # half of the way from the end of the warm-up
    assert cosine[-1] == pytest.approx(2.0 * 0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert all(later <= earlier for earlier, later in itertools.pairwise(cosine[2:]))
    assert configs.learning_rate(ScheduleConfig(warmup_fraction=0.0, end=0.25), 2.0, 10, 10) == pytest.approx(0.5)
    stable = rates(10, name="wsd", warmup_steps=2, decay_fraction=0.4, end=0.5)
    assert stable == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.75, 1.5, 1.25])
    assert rates(10, name="wsd", warmup_steps=0) == pytest.approx([2.0] * 9 + [1.0])  # the last fifth by default
    assert rates(10, name="wsd", warmup_steps=0, decay_fraction=0.0) == [2.0] * 10
    assert rates(4, name="wsd", warmup_steps=3, decay_fraction=1.0) == pytest.approx([2 / 3, 4 / 3, 2.0, 2.0])
    with pytest.raises(ValueError, match=r"schedule.decay_fraction must not be set for schedules other than \"wsd\", got 0.1"):
        ScheduleConfig(decay_fraction=0.1)
    with pytest.raises(ValueError, match=r"schedule.decay_fraction must be from 0 to 1, got 2.0"):
        ScheduleConfig("wsd", decay_fraction=2.0)
    assert rates(3, warmup_steps=100) == pytest.approx([2 / 3, 4 / 3, 2.0])  # shorter than its warm-up
    # One step and the whole run, which 1 and 1.0 would not tell apart.
    assert rates(4, name="constant", warmup_steps=1) == [2.0] * 4
    assert rates(4, name="constant", warmup_fraction=1) == [0.5, 1.0, 1.5, 2.0]
    for wrong in ({"warmup_steps": -1}, {"warmup_fraction": 1.5}, {"warmup_fraction": math.nan}):
        with pytest.raises(ValueError, match=rf"schedule\.{next(iter(wrong))} must be .*got {next(iter(wrong.values()))}"):
            ScheduleConfig(**wrong)
    with pytest.raises(ValueError, match=r"schedule\.warmup_steps must not be set .*0\.5, got 3"):
        ScheduleConfig(warmup_steps=3, warmup_fraction=0.5)

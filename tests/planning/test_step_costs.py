"""A plan's arithmetic on towers that can be counted by hand, its limits, and what it says."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from megabatch_train.planning import costs, gpus, step
from megabatch_train.planning.costs import INF_CL, LOCAL, MEGABATCH, VANILLA, loss_bytes
from megabatch_train.planning.models import Model, ModelSide, nowhere, without_data
from megabatch_train.planning.step import DEVICE, HOST, REPLAY, Setup

WIDTH = 128


class Hidden(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 512, bias=False), nn.ReLU(), nn.Linear(512, WIDTH, bias=False))

    def forward(self, x):
        return self.layers(x)


def model(first=64, second=256):
    sides = []
    for name, inputs in (("image", first), ("text", second)):
        with torch.device("meta"):
            module = Hidden(inputs)
        with nowhere():
            without_data(module)
        sides.append(ModelSide(name, module, lambda n, inputs=inputs: {"x": torch.zeros(n, inputs)}))
    return Model("by hand", tuple(sides))


GPU = replace(gpus.find("A100-40GB"), memory_gb=1)


def plan(chunk=64, **options):
    return step.make(model(), Setup(GPU, options.pop("per_node", 1), precision="fp32", **options), chunk)


PARAMETERS = 512 * (64 + WIDTH) + 512 * (256 + WIDTH)


def test_a_cached_step_by_hand():
    B, found = 1000, plan()
    m = found.while_encoding(B, REPLAY)
    assert (m.weights, m.gradients, m.optimizer, m.casts) == (4 * PARAMETERS, 4 * PARAMETERS, 8 * PARAMETERS, 0)
    # The second tower's last moment: embeddings and their gradient, the hidden layer's, and that of the first weights.
    assert m.activations == 64 * 4 * (2 * WIDTH + 512) + 4 * 512 * 256
    assert m.embeddings == 2 * B * WIDTH * 4
    assert m.inputs == 2 * 64 * 4 * 256  # two chunks of the larger tower's
    assert m.loss == 0
    assert found.while_encoding(B, DEVICE).inputs == B * 4 * (64 + 256)
    while_loss = found.while_comparing(B, MEGABATCH, REPLAY)
    assert (while_loss.activations, while_loss.inputs) == (0, 0)
    assert while_loss.loss == loss_bytes(MEGABATCH, found.shape(B))
    assert found.peak_with_caching(B, MEGABATCH, REPLAY).total == max(m.total, while_loss.total)
    assert found.host_bytes(B) == B * 4 * (64 + 256)


def test_a_plain_step_by_hand():
    B, found = 1000, plan()
    m = found.plain(B, LOCAL)
    assert m.activations == pytest.approx(2 * B * 4 * (512 + WIDTH), rel=0.001)
    assert m.loss == pytest.approx(16 * B**2 + 8 * B * WIDTH)


def test_time_by_hand():
    B, found = 4096, plan()
    seconds = found.seconds(B)
    rate = GPU.single * 1e12
    forward = 2 * PARAMETERS * B / (rate * gpus.ENCODER_EFFICIENCY)
    assert seconds.encode == seconds.recompute == pytest.approx(forward)
    backward = 2 * forward - 2 * 512 * (64 + 256) * B / (rate * gpus.ENCODER_EFFICIENCY)  # nobody asks for d inputs
    assert seconds.backward == pytest.approx(backward)
    assert found.seconds(2**17).loss == pytest.approx(8 * 2**34 * WIDTH / (rate * gpus.LOSS_EFFICIENCY), rel=0.01)
    assert seconds.waiting == 0
    assert found.seconds(B, cached=False).recompute == 0


def test_ranks_share_pairs_and_ddp_has_buckets():
    found = plan(per_node=4, nodes=2)
    assert found.rows(1001) == 126
    assert found.states.gradients == 8 * PARAMETERS
    assert found.while_encoding(8000, REPLAY).embeddings == 2 * 1000 * WIDTH * 4
    assert found.seconds(8000).waiting > 0


def test_columns_go_to_one_gpu_and_gradients_to_all():
    switched, mesh = (
        step.make(model(), Setup(gpu, 8), 64) for gpu in (replace(GPU, inside=448), replace(GPU, inside=448, to_one=64))
    )
    # At a few pairs a GPU the columns' way is all that is waited for, beside the gradients, which use every link in both.
    gradients = 2 * 7 / 8 * 4 * PARAMETERS / (448e9 * gpus.LINK_EFFICIENCY)
    assert costs.all_reduce_seconds(mesh.setup.all_links, 4 * PARAMETERS) == pytest.approx(gradients)
    assert (switched.setup.cluster.inside.bandwidth, mesh.setup.cluster.inside.bandwidth) == pytest.approx((358.4e9, 51.2e9))
    assert step.on(mesh, 1, 3).setup.all_links.inside.bandwidth == pytest.approx(2 * 51.2e9)  # two others, two links
    assert mesh.seconds(2**15).waiting > switched.seconds(2**15).waiting
    assert mesh.seconds(2**15, LOCAL).waiting == switched.seconds(2**15, LOCAL).waiting


@pytest.mark.parametrize("sharding", step.SHARDINGS)
def test_what_is_sharded(sharding):
    states = plan(per_node=4, sharding=sharding).states
    assert states.optimizer == 8 * PARAMETERS / (1 if sharding == "none" else 4)
    if sharding == "fsdp":
        assert states.weights == PARAMETERS + 2 * 4 * 512 * 256
        assert states.gradients == 4 * PARAMETERS
    else:
        assert (states.weights, states.gradients) == (4 * PARAMETERS, 8 * PARAMETERS)


@pytest.mark.parametrize(("optimizer", "numbers"), [("adamw", 2), ("lion", 1), ("none", 0)])
def test_optimizers(optimizer, numbers):
    assert plan(optimizer=optimizer).states.optimizer == 4 * numbers * PARAMETERS


@pytest.mark.parametrize("system", step.SYSTEMS)
@pytest.mark.parametrize("source", [None, *step.SOURCES])
def test_the_largest_batch_fits_and_the_next_does_not(system, source):
    found = plan(per_node=2)
    largest = found.largest(system, source)
    assert largest > 0
    assert largest % 2 == 0

    def total(batch):
        return found.plain(batch, system).total if source is None else found.peak_with_caching(batch, system, source).total

    assert total(largest) <= GPU.usable < total(largest + 2)


def test_sources_and_systems_are_in_the_order_they_should_be():
    found = plan(per_node=8)
    on_device, on_host, replayed = (found.largest(MEGABATCH, source) for source in (DEVICE, HOST, REPLAY))
    assert on_device < on_host <= replayed
    vanilla, local, inf_cl = (found.largest(system, HOST) for system in (VANILLA, LOCAL, INF_CL))
    assert vanilla < local < inf_cl < replayed
    assert found.largest(LOCAL, None) < local


def test_the_hosts_memory_is_a_limit_for_what_is_kept_there():
    small = plan(host_memory=1e6)
    assert small.largest(MEGABATCH, HOST) == 1_000_000 // (4 * (64 + 256))
    assert small.largest(MEGABATCH, REPLAY) > 10_000


def test_nothing_fits():
    found = plan()
    tiny = replace(found, setup=replace(found.setup, gpu=replace(GPU, memory_gb=0.001)))
    assert tiny.largest(MEGABATCH, REPLAY) == 0
    assert "Not even one pair per GPU fits" in step.advice(tiny)


def test_a_chunk_is_chosen_by_the_memory():
    chosen = [step.make(model(), Setup(replace(GPU, memory_gb=gb), 1, precision="fp32")).chunk for gb in (0.0005, 0.005, 1)]
    assert chosen[0] < chosen[1] < chosen[2] == step.CHUNKS[0]


@pytest.mark.parametrize(
    ("batch", "gb", "says"),
    [
        (256, 1, "A plain step with 256 pairs fits"),
        (20000, 1, "With 20,000 pairs the loss does not fit; the encoder does"),
        (100, 0.0029, "With 100 pairs the encoder does not fit; the loss does"),
        (3000, 0.01, "With 3,000 pairs neither the loss nor the encoder fits"),
        (1000, 0.0238, "With 1,000 pairs the loss and the encoder each fit separately, but not together"),
    ],
)
def test_is_it_my_loss_or_my_encoder(batch, gb, says):
    found = plan(optimizer="none")
    found = replace(found, setup=replace(found.setup, gpu=replace(GPU, memory_gb=gb)))
    whole = found.plain(batch, LOCAL)
    assert step.verdict(found, batch).startswith(says), [whole.activations / 2**20, whole.loss / 2**20, whole.total / 2**20]


@pytest.mark.parametrize(
    ("option", "known", "wrong"), [("precision", "bf16", "fp8"), ("optimizer", "adamw", "adam9"), ("sharding", "fsdp", "ddp")]
)
def test_wrong_options(option, known, wrong):
    with pytest.raises(ValueError, match=f"{option} .*{known}.* got '{wrong}'"):
        Setup(GPU, 1, **{option: wrong})

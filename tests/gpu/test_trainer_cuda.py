"""Training on a CUDA device: the chunk size is found, memory that runs out is survived, a continued run has the same bits."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import runs
from megabatch import ClipLoss, HostSource
from megabatch.world import World
from megabatch_train.towers.layers.fast_layers import replace_patch_convolutions
from megabatch_train.towers.tower import Pair, Tower, compile_towers, compiler_settings

# The compiler imports modules that use what PyTorch has deprecated, and recommends TF32, which would round float32 steps.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

HUNGRY = 1 << 17  # numbers that a sample's activations have: 512 KiB


class Hungry(nn.Module):
    """Takes much memory for each sample, and fails where a chunk has more than `most` samples."""

    most = 10**9

    def __init__(self):
        super().__init__()
        self.wide, self.narrow, self.dropout = nn.Linear(runs.WIDTH, HUNGRY), nn.Linear(HUNGRY, 8), nn.Dropout(0.1)

    def forward(self, x):
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return F.normalize(self.narrow(self.dropout(F.relu(self.wide(x)))), dim=1)


def prepare(sample, generator):
    return runs.prepare(sample, generator).float()


def hungry():
    torch.manual_seed(0)
    nets = [Hungry() for _ in range(2)]
    sides = zip(nets, ("image", "text"), strict=True)
    return Pair(*(Tower(net, kind, prepare, runs.collate) for net, kind in sides), 5.0, name="hungry")


def trainer(folder, **changes):
    changes = {"batch_size": 512, "chunk_size": "auto", "steps": 4, "memory": {"chunk": 0.0001, "graphs": 0.0}, **changes}
    changes = {"precision": "fp32", "compile": "off", **changes}
    world = World(torch.device("cuda", torch.cuda.current_device()))
    return runs.trainer(folder, changes, pair=hungry(), data=runs.Numbers(samples=600), world=world)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_chunks_grow_until_the_budget(tmp_path, precision):
    made = trainer(tmp_path / "small", precision=precision)
    made.fit()
    small = made._fit.chunk_sizes
    larger = trainer(tmp_path / "large", precision=precision, memory={"chunk": 0.5, "graphs": 0.0})
    larger.fit()
    assert larger._fit.chunk_sizes == (512, 512)
    assert 32 <= small[0] < 512
    assert torch.isfinite(made.objective.log_scale)


def test_a_continued_run_has_the_same_bits(tmp_path):
    whole, half = trainer(tmp_path / "whole"), trainer(tmp_path / "half", checkpoint={"every": 2, "keep": 9})
    whole.fit()
    half.fit()
    again = trainer(tmp_path / "half", checkpoint={"every": 2, "keep": 9})
    assert again.resume(tmp_path / "half" / "checkpoints" / "step_00000002")
    again.fit()
    assert runs.same_bits(runs.weights(again), runs.weights(whole)) == []


def test_memory_that_runs_out_in_training_is_survived(tmp_path, monkeypatch, caplog):
    made = trainer(tmp_path, chunk_size=256)
    monkeypatch.setattr(Hungry, "most", 100)
    made.fit()
    assert made._fit.chunk_sizes == (64, 64)
    assert "the step is repeated with chunks of (64, 64) samples" in caplog.text


def test_compiled_towers_learn_the_same(tmp_path, caplog):
    """Dropout included. fp32, so that the rest is rounding.

    AdamW divides a gradient by its size, so an element whose gradient is almost zero moves by a whole learning rate in either
    direction. A few of a million do, so each tensor's change is compared as a whole. Another dropout mask would change more.
    """
    made = {how: trainer(tmp_path / how, compile=how, chunk_size=100, steps=3) for how in ("off", "on")}
    before = runs.weights(made["off"])
    for one in made.values():
        one.fit()
    assert "cannot be compiled" not in caplog.text
    wanted, found = (runs.weights(made[how]) for how in ("off", "on"))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        change = (value - before[name].to(value.device)).norm()
        assert change > 0, f"{name} has not learned"
        assert (found[name] - value).norm() <= 1e-2 * change, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_patch_embeddings_are_products_under_autocast(dtype, layout):
    """Values and gradients, against float64 on the same numbers."""
    layer = nn.Conv2d(3, 64, 32, stride=32, device="cuda").to(dtype).float()
    images = torch.randn(8, 3, 224, 230, device="cuda").to(dtype).float().to(memory_format=layout)
    weights = torch.randn(8, 64, 7, 7, device="cuda").to(dtype)

    def results(layer, images):
        inputs = [images.requires_grad_(), *layer.parameters()]
        values = layer(images)
        return [values.detach(), *torch.autograd.grad((values * weights.to(values.dtype)).sum(dtype=torch.float64), inputs)]

    wanted = results(copy.deepcopy(layer).double(), images.double())
    replace_patch_convolutions([layer])
    with torch.autocast("cuda", dtype):
        found = results(layer, images)
    assert found[0].dtype == dtype
    assert found[0].permute(0, 2, 3, 1).is_contiguous()
    for actual, expected in zip(found, wanted, strict=True):
        assert (actual.double() - expected).norm() <= 2 * torch.finfo(dtype).eps * expected.norm()


def test_the_defaults_train(tmp_path):
    memory = runs.Memory()
    made = trainer(tmp_path, precision="auto", compile="auto", workers="auto")
    made._observers._observers.append(memory)
    made.fit()
    assert (made.config.precision, made.config.compile) == ("bf16", "on")
    for record in memory.records:
        assert set(record["phases"]) >= {"data", "forward", "loss", "backward", "optimizer"}
        assert sum(record["phases"].values()) > 0
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_fast_step_rounds_like_the_plain_one(capsys):
    """bf16: captions sorted and cut, layers compiled; against full captions and no compiler in two chunk sizes."""
    open_clip = pytest.importorskip("open_clip")
    from megabatch.integrations.open_clip import cached_backward

    torch.manual_seed(0)
    vision = open_clip.CLIPVisionCfg(layers=4, width=256, head_width=64, patch_size=32, image_size=224)
    text = open_clip.CLIPTextCfg(layers=4, width=256, heads=4, vocab_size=1000)
    model = open_clip.CLIP(64, vision, text).cuda()
    images = torch.randn(256, 3, 224, 224, device="cuda")
    lengths = torch.randint(4, 40, (256,))
    texts = torch.randint(1, 900, (256, 77)) * (torch.arange(77) < lengths[:, None])
    texts[torch.arange(256), lengths] = 999  # the end
    texts = texts.cuda()

    def gradients(chunk, captions, precision):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            cached_backward(model, images, captions, ClipLoss(), chunk_size=chunk)
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    padded = HostSource(texts, lengths=None)
    wanted = gradients(64, padded, "fp32")
    plain = [gradients(chunk, padded, "bf16") for chunk in (32, 128)]
    assert compile_towers([model], World(torch.device("cuda")))
    with compiler_settings():
        fast = gradients(64, texts, "bf16")

    def apart(one, other):
        return float((one - other).norm() / wanted.norm())

    with capsys.disabled():
        print(f"\nplain {apart(*plain):.2e} apart; fast from plain {max(apart(fast, one) for one in plain):.2e};", end=" ")
        print(f"from float32: plain {[f'{apart(one, wanted):.2e}' for one in plain]}, fast {apart(fast, wanted):.2e}")
    assert apart(fast, wanted) <= 1.1 * max(apart(one, wanted) for one in plain)

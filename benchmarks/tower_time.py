"""Measures where the time of compiled towers goes: matmuls, attention, normalization, and other operations.

For each model and each side, the script encodes one chunk without a graph, and forward and backward, in bf16 autocast. It
measures several ways to compute self-attention:

- "torch": `nn.MultiheadAttention`
- "packed": `SelfAttention` without its kernel
- "cudnn": like "packed", with the attention of cuDNN
- "kernel": `SelfAttention` as in training
- "float8": like "kernel", with matmuls of the blocks in float8 (one scale for each tensor, gradients in e5m2)

It compares the embeddings and the gradients with "torch", then measures the time, and then profiles one pass. The bound is the
time that the floating-point operations take at the rate of a large bf16 matmul.
"""

import argparse
import contextlib
import functools
import json
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megabatch.cached.streaming import map_rows
from megabatch.cached.tower import call
from megabatch.world import World
from megabatch_train import towers
from megabatch_train.bench.measure import Record, arguments, chip, device_of, milliseconds, number_options, paragraphs
from megabatch_train.display.tables import TextTable
from megabatch_train.towers import tower
from megabatch_train.towers.layers import fast_layers
from megabatch_train.towers.tokens import INPUT, count_kept
from megabatch_train.trainer.build import autocast

WAYS = ("torch", "packed", "cudnn", "kernel", "float8")
DEFAULT_WAYS = ("torch", "packed", "kernel")
# The first pattern that matches the name of a GPU kernel gives its category.
CATEGORIES = {
    "attention": r"flash|fmha|attention|sdpa",
    "matmul": r"gemm|nvjet|cutlass|xmma|cublas|splitKreduce",
    "layer norm": r"layer_norm",
    "GELU": r"gelu|erf|sigmoid",
    "bias gradients": r"triton_red|triton_per|reduce",
    "casts and copies": r"copy|memcpy|memset|cat|_to_copy",
    "other": r"",
}
SENTENCE = "a brown dog with a red collar runs across the wet grass near a small river while two children watch it closely"
TINY_MODEL = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
}


def load(model: str, dropout: float, device: str) -> Any:
    torch.manual_seed(0)
    options = {"patch_dropout": dropout} if dropout else {}
    pair = towers.load(f"open_clip:{model}", **options)
    for module in pair.modules:
        module.to(device)
    return pair


def chunk_of(pair: Any, side: int, chunk: int, device: str) -> Any:
    """Returns inputs of a tower: images of noise, or captions of 6 to 20 words, trimmed to the longest one."""
    generator = torch.Generator().manual_seed(1)
    one = pair.towers[side]
    if side == 0:
        samples = [torch.randint(0, 256, (3, 256, 256), dtype=torch.uint8, generator=generator) for _ in range(8)]
    else:
        samples = [" ".join(SENTENCE.split()[: 6 + i * 2]) for i in range(8)]
    inputs = one.collate([one.prepare(sample, None) for sample in samples])
    inputs = inputs if isinstance(inputs, dict) else {"images": inputs}
    lengths = one.lengths(inputs) if one.lengths is not None else None
    if lengths is not None:
        inputs = {key: tensor[:, : int(lengths.max())] for key, tensor in inputs.items()}
    return map_rows(lambda tensor: tensor.repeat(chunk // 8, *[1] * (tensor.dim() - 1)).to(device), inputs)


@contextlib.contextmanager
def use(way: str) -> Any:
    with contextlib.ExitStack() as stack:
        if way == "torch":
            stack.enter_context(mock.patch.object(tower, "replace_self_attention"))
        elif way in ("packed", "cudnn"):
            stack.enter_context(mock.patch.object(fast_layers, "LONGEST", 0))
        if way == "cudnn":
            backends = [torch.nn.attention.SDPBackend.CUDNN_ATTENTION, torch.nn.attention.SDPBackend.FLASH_ATTENTION]
            stack.enter_context(torch.nn.attention.sdpa_kernel(backends, set_priority=True))
        yield


class Float8Matmul(torch.autograd.Function):
    """x · wᵀ in float8 with one scale for each tensor, forward and backward, and a result in bfloat16."""

    @staticmethod
    def forward(context: Any, x: Any, weight: Any) -> Any:  # (M, K), (N, K) -> (M, N)
        """Rounds both matrices and multiplies them."""
        (x8, of_x), (weight8, of_weight) = quantize(x), quantize(weight)
        context.save_for_backward(x8, of_x, weight8, of_weight)
        return multiply(x8, of_x, weight8.t(), of_weight)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        """Returns the gradients, which are float8 matmuls too."""
        x8, of_x, weight8, of_weight = context.saved_tensors
        gradient8, of_gradient = quantize(gradient, torch.float8_e5m2)
        dx = multiply(gradient8, of_gradient, weight8.t().contiguous().t(), of_weight)
        dweight = multiply(gradient8.t().contiguous(), of_gradient, x8.t().contiguous().t(), of_x)
        return dx, dweight


def quantize(tensor: Any, dtype: Any = torch.float8_e4m3fn) -> Any:
    scale = tensor.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (tensor.float() / scale).to(dtype), scale


def multiply(a: Any, of_a: Any, b: Any, of_b: Any) -> Any:
    return torch._scaled_mm(a, b, scale_a=of_a, scale_b=of_b, out_dtype=torch.bfloat16, use_fast_accum=True)


class Float8Linear(torch.nn.Linear):
    """A linear layer with `Float8Matmul`."""

    def forward(self, x: Any) -> Any:
        """Returns the output in bfloat16."""
        flat = Float8Matmul.apply(x.flatten(0, -2).bfloat16(), self.weight.bfloat16())
        return (flat + self.bias.bfloat16()).unflatten(0, x.shape[:-1])


def use_float8(modules: Any) -> None:
    """Replaces the linear layers of the MLPs and the output projections of attention. Input projections stay in bf16."""
    for module in modules:
        for name, part in module.named_modules():
            if isinstance(part, torch.nn.Linear) and ".resblocks." in name and min(part.weight.shape) % 16 == 0:
                part.__class__ = Float8Linear


def measure_way(record: Record, args: argparse.Namespace, model: str, dropout: float, way: str, reference: dict) -> None:
    torch._dynamo.reset()
    pair, device = load(model, dropout, args.device), torch.device(args.device)
    cast = autocast("bf16", device)
    if way == "float8":
        use_float8(pair.modules)
    with use(way), tower.compiler_settings():
        if args.device == "cuda":
            tower.compile_towers(pair.modules, World(device))
        else:
            tower.replace_self_attention(pair.modules, device)
        for side, module in enumerate(pair.modules):
            module.train()
            inputs = chunk_of(pair, side, args.chunk, args.device)
            if side == 0 and dropout:
                kept = count_kept(pair.first.patches, dropout)
                inputs[INPUT] = torch.arange(kept, device=device).expand(args.chunk, -1)

            def encode(module: Any = module, inputs: Any = inputs) -> Any:
                with torch.no_grad(), cast:
                    return call(module, inputs)

            def train(module: Any = module, inputs: Any = inputs, side: int = side) -> Any:
                with cast:
                    output = call(module, inputs).float()
                (output * _weights(output, side)).sum().backward()
                return output.detach()

            embeddings = train()
            gradients = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
            module.zero_grad()
            expected = reference.setdefault((model, dropout, side), (embeddings, gradients))
            errors = [float((a - b).norm() / b.norm()) for a, b in zip((embeddings, gradients), expected, strict=True)]
            with tower.FlopCounter() as counter, tower.without_compiler(pair.modules):
                encode()
            encode()  # compiles
            forward, both = (milliseconds(work, args.device, args.share) for work in (encode, train))
            row = {
                "model": Path(model).stem,
                "dropout": dropout,
                "side": pair.towers[side].kind,
                "way": way,
                "chunk": args.chunk,
            }
            row |= {"forward_ms": forward, "both_ms": both, "flops": counter.total, "errors": errors}
            row["profile"] = profile(train) if args.device == "cuda" else {}
            module.zero_grad()
            record["results"].append(row)
            record.save()
            record.say(
                f"{model}, dropout {dropout}, {row['side']}, {way}: forward {forward:.1f} ms, both {both:.1f} ms, bound "
                f"{bound(record, row):.1f} ms, errors {errors[0]:.1e} {errors[1]:.1e}"
            )
            if args.kernels:
                for name, kernel_ms in sorted(kernels_of(train).items(), key=lambda pair: -pair[1])[: args.kernels]:
                    print(f"      {kernel_ms:8.3f} ms  {name[:150]}", flush=True)


@functools.cache
def _weights_of(shape: torch.Size, device: torch.device, side: int) -> torch.Tensor:
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(side))


def _weights(output: torch.Tensor, side: int) -> torch.Tensor:
    """Returns the gradient of the embeddings, which is the same for each way."""
    return _weights_of(output.shape, output.device, side)


def kernels_of(work: Any) -> dict[str, float]:
    """Returns the milliseconds of each GPU kernel."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    totals: dict[str, float] = defaultdict(float)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name] += event.device_time / 1000
    return totals


def profile(work: Any) -> dict[str, float]:
    """Returns the milliseconds of each category."""
    totals: dict[str, float] = defaultdict(float)
    for name, kernel_ms in kernels_of(work).items():
        category = next(category for category, pattern in CATEGORIES.items() if re.search(pattern, name))
        totals[category] += kernel_ms
    return dict(totals)


def bound(record: Any, row: dict[str, Any]) -> float:
    """Returns the milliseconds that the matmuls of a forward and a backward pass would take at the measured rate."""
    return 3 * row["flops"] / record["matmul_flops"] * 1000


def matmul_rate(device: str, size: int) -> float:
    """Returns the operations per second of a large bf16 matmul."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / milliseconds(lambda: a @ b, device, 0.3) * 1000


def markdown(record: dict[str, Any]) -> str:
    """Returns the Markdown of a record."""
    about = (
        f"# Time of the towers\n\n{chip(record)}, chunks of {record['chunk']:,}, bf16 autocast, compiled. A large bf16 matmul "
        f"reaches {record['matmul_flops'] / 1e12:,.0f} TFLOP/s, and the bound is the time of the towers at this rate. "
        'Columns after the bound are milliseconds of GPU kernels in one forward and backward pass. "Rest" is the '
        "time between kernels."
    )
    names = list(CATEGORIES)
    headings = ["model, side, attention", "forward, ms", "forward + backward, ms", "bound, ms", *names, "rest"]
    rows = []
    for row in record["results"]:
        dropped = f", patch dropout {row['dropout']}" if row["dropout"] else ""
        cells = [f"{row['model']}{dropped}, {row['side']}, {row['way']}"]
        cells += [f"{row['forward_ms']:.1f}", f"{row['both_ms']:.1f}", f"{bound(record, row):.1f}"]
        cells += [f"{row['profile'].get(name, 0.0):.1f}" for name in names]
        rows.append([*cells, f"{row['both_ms'] - sum(row['profile'].values()):.1f}"])
    return paragraphs(about, TextTable(headings, rows).markdown())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser, "tower_time", 200)
    parser.add_argument("--models", nargs="+", default=["ViT-B-32", "ViT-B-16", "ViT-L-14"], help="models of open_clip")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(DEFAULT_WAYS))
    parser.add_argument("--dropout", nargs="+", type=float, default=[0.0], help="patch dropout")
    number_options(
        parser, chunk=(1024, "samples encoded at once, a multiple of 8"), kernels=(0, "kernels to print for each row")
    )
    args = parser.parse_args()
    args.device, args.share, size = device_of(args), 0.5, 8192
    if args.tiny:
        path = Path(tempfile.mkdtemp()) / "tiny.json"
        path.write_text(json.dumps(TINY_MODEL))
        args.models, args.chunk, args.share, size = [str(path)], 8, 0.01, 64
    record = Record.of_script("tower_time", args, args.seconds, chunk=args.chunk, matmul_flops=matmul_rate(args.device, size))
    reference: dict[Any, Any] = {}
    for model in args.models:
        for dropout in args.dropout:
            for way in args.ways:
                if record.seconds_left() > 0:
                    measure_way(record, args, model, dropout, way, reference)
            reference.clear()
    record.finish(markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())

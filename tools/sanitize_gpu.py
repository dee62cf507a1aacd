"""Runs every kernel once under compute-sanitizer, at odd shapes, on a machine with a GPU.

    python tools/sanitize_gpu.py                      all kernels: bad addresses, then races in shared memory
    python tools/sanitize_gpu.py --only late small    cases whose names contain one of these words
    python tools/sanitize_gpu.py --tools memcheck     one check only

Fails if compute-sanitizer finds an error or a case cannot run. PyTorch's memory cache is off, so that each tensor is an
allocation of its own and a read behind its end is found. Races are not sought in the warp-specialised kernel, because of the
twelve bytes in which Triton tells warps their work (docs/log.md).
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck")
# Triton stores which part each warp has, and numbers they share, before a barrier, and warps read them after it. racecheck does
# not follow that barrier here. It names every place of the kernel by the same two lines, so the reports cannot be told apart.
EXCLUDED = {"racecheck": ("--kernel-name-exclude", "kns=_warp_specialized_kernel")}
FOUND = 9  # exit status if compute-sanitizer finds an error
HALF, SINGLE = torch.bfloat16, torch.float32

Case = Callable[[], Any]


def _vectors(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator), dim=-1).to("cuda", dtype).requires_grad_()


def _pairs(N: int, D: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _vectors(N, D, dtype=dtype), _vectors(N, D, dtype=dtype, seed=1)


def _number(value: float) -> Tensor:
    return torch.tensor(value, device="cuda", requires_grad=True)


def _learn(loss: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Forward and backward, with numbers that are finite."""
    value = loss(*inputs)
    for found in (value, *torch.autograd.grad(value, inputs, allow_unused=True)):
        if found is not None and not bool(found.isfinite().all()):
            raise RuntimeError("a result is not finite")


def _cases() -> dict[str, Case]:
    """Every loss by each of its ways: in memory (`small`), over tiles (`pairs` above 8,192 rows), and in single precision."""
    found: dict[str, Case] = {}
    for dtype in (HALF, torch.float16, SINGLE):
        for N in (2, 67, 197):
            _small(found, N, 72, dtype)
    _small(found, 4099, 72, HALF)  # library products
    for N, D in ((8333, 136), (8333, 520)):
        found[f"pairs {N}x{D}"] = partial(_learn, mb.clip_loss, *_pairs(N, D, HALF), _number(20.0))
        ids = torch.arange(N, device="cuda") // 2
        found[f"pairs {N}x{D} ids"] = partial(_learn, partial(mb.clip_loss, ids=ids), *_pairs(N, D, HALF), _number(20.0))
        found[f"sigmoid {N}x{D}"] = partial(_learn, mb.siglip_loss, *_pairs(N, D, HALF), _number(10.0), _number(-10.0))
        positives = partial(mb.siglip_loss, ids=ids, ids_are_positives=True)
        found[f"sigmoid {N}x{D} ids"] = partial(_learn, positives, *_pairs(N, D, HALF), _number(10.0), _number(-10.0))
    for dtype in (HALF, SINGLE):
        _tiled(found, 333, 72, dtype)
        _late(found, dtype)
    return found


def _small(found: dict[str, Case], N: int, D: int, dtype: torch.dtype) -> None:
    name, (x, y), scale = f"{N}x{D} {dtype}", _pairs(N, D, dtype), _number(20.0)
    labels = torch.arange(N, device="cuda") // 3
    found[f"small clip {name}"] = partial(_learn, mb.clip_loss, x, y, scale)
    found[f"small clip ids {name}"] = partial(_learn, partial(mb.clip_loss, ids=labels), x, y, scale)
    found[f"small siglip {name}"] = partial(_learn, mb.siglip_loss, x, y, scale, _number(-10.0))
    found[f"small siglip positives {name}"] = partial(
        _learn, partial(mb.siglip_loss, ids=labels, ids_are_positives=True), x, y, scale, _number(-10.0)
    )
    found[f"small info_nce {name}"] = partial(_learn, lambda x, y, s: mb.info_nce_loss(x, y, scale=s), x, y, scale)
    found[f"small nt_xent {name}"] = partial(_learn, mb.nt_xent_loss, x, y, scale)
    found[f"small sup_con {name}"] = partial(_learn, lambda z, s: mb.sup_con_loss(z, labels, s), x, scale)


def _tiled(found: dict[str, Case], N: int, D: int, dtype: torch.dtype) -> None:
    """Kernels over tiles; losses of one value a pair take them at any size."""
    name, (x, y), scale = f"{N}x{D} {dtype}", _pairs(N, D, dtype), _number(20.0)
    seen, read = (part.detach() for part in _pairs(N, 48, SINGLE))  # by another model

    def each(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *inputs: loss(*inputs, reduction="none").sum()

    found[f"tiles clip {name}"] = partial(_learn, each(mb.clip_loss), x, y, scale)
    found[f"tiles siglip {name}"] = partial(_learn, each(mb.siglip_loss), x, y, scale, _number(-10.0))
    found[f"tiles guide {name}"] = partial(
        _learn, lambda x, y, s: mb.info_nce_loss(x, y, scale=s, guide=(seen, read)), x, y, scale
    )
    found[f"tiles margin {name}"] = partial(_learn, lambda x, y, s: mb.info_nce_loss(x, y, scale=s, margin=0.0), x, y, scale)
    found[f"tiles soft_clip {name}"] = partial(
        _learn, lambda x, y, s: mb.soft_clip_loss(x, y, s, seen, read, 30.0), x, y, scale
    )
    found[f"tiles nt_xent {name}"] = partial(_learn, each(mb.nt_xent_loss), x, y, scale)
    found[f"tiles ranks {name}"] = partial(mb.pairwise_rank, x, y)
    found[f"tiles topk {name}"] = partial(mb.pairwise_topk, x, _vectors(20_011, D, dtype=dtype, seed=2), 7)


def _late(found: dict[str, Case], dtype: torch.dtype) -> None:
    for B, Lq, Ld, D in ((37, 32, 128, 128), (37, 20, 180, 96), (21, 150, 33, 128), (19, 5, 300, 320)):
        query, document = _vectors(B, Lq, D, dtype=dtype), _vectors(B, Ld, D, dtype=dtype, seed=1)
        mask = torch.rand(B, Ld, generator=torch.Generator().manual_seed(2)).to("cuda") > 0.2
        mask[:, 0] = True
        found[f"late {B}x{Lq}x{Ld}x{D} {dtype}"] = partial(
            _learn, partial(mb.late_interaction_loss, scale=1.0, document_mask=mask, backend="triton"), query, document
        )


def _run(only: list[str], shard: int, shards: int) -> None:
    """Every n-th of the cases, in this process."""
    chosen = [(name, case) for name, case in _cases().items() if not only or any(word in name for word in only)]
    for name, case in chosen[shard::shards]:
        try:
            case()
            torch.cuda.synchronize()
        except Exception as error:
            raise RuntimeError(f"{name} failed") from error
        print("done:", name, flush=True)


def _summary(output: str) -> str:
    """What was reported, and where, each once; without a report, the end of the output."""
    lines = [
        re.sub(r"\+0x[0-9a-f]+| \[\d+ hazards\]", "", line) for line in output.splitlines() if line.startswith("=========")
    ]
    reports = [f"{lines.count(line):5} × {line}" for line in dict.fromkeys(lines) if " at " in line or "Invalid" in line]
    return "\n".join(reports) if reports else output[-4000:]


def _check(tool: str, only: list[str], processes: int) -> bool:
    """Runs all cases under one tool, in several processes, because most of the time is spent on compiling kernels."""
    began = time.monotonic()
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--error-exitcode",
        str(FOUND),
        "--print-limit",
        "5",
        *EXCLUDED.get(tool, ()),
        sys.executable,
        __file__,
    ]
    command += ["--only", *only] if only else []
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    running = [
        subprocess.Popen(
            [*command, "--shard", str(shard), str(processes)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for shard in range(processes)
    ]  # fmt: skip
    done, failed = 0, 0
    for number, process in enumerate(running):
        output, _ = process.communicate()
        found = len(re.findall("^done: ", output, re.MULTILINE))
        done += found
        print(f"[{time.monotonic() - began:4.0f} s] {tool}, process {number + 1} of {processes}: {found} cases", flush=True)
        if process.returncode != 0:
            failed += 1
            print(f"exit status {process.returncode}\n{_summary(output)}")
    print(f"{tool}: {done} cases, {'clean' if not failed else f'{failed} processes failed'}", flush=True)
    return not failed


def main() -> int:
    """Returns 1 if a check found an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases with one of these words (default: all)")
    parser.add_argument(
        "--tools", nargs="+", default=TOOLS, choices=(*TOOLS, "initcheck", "synccheck"), help="(memcheck racecheck)"
    )
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="side by side (%(default)s)")
    parser.add_argument(
        "--shard", type=int, nargs=2, metavar=("I", "N"), help="run every N-th case here, without compute-sanitizer"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here, and compute-sanitizer checks kernels on one")
        return 1
    if options.shard is not None:
        _run(options.only, *options.shard)
        return 0
    clean = [_check(tool, options.only, options.processes) for tool in options.tools]  # all of them, whatever one finds
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())

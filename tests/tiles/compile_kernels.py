"""Compiles every kernel for a GPU that need not be present. Run by test_triton_compiles.py.

    python compile_kernels.py CAPABILITY PRECISION [features] [two_columns]

The interpreter accepts programs that the compiler rejects. Here the launchers run on CPU tensors, and each launch compiles its
kernel for the given arguments instead of running it.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megabatch.dispatch import Execution
from megabatch.kernels import gradient, logsumexp, operands, pairs, ranking, small_gradients, two_models
from megabatch.kernels import plan as kernel_plan
from megabatch.late import kernels as late_kernels
from megabatch.late import small as late_small
from megabatch.late.tiles import LateBlock, TokenRows
from megabatch.operators import dense, one_gpu
from megabatch.tiles import eager, plan
from megabatch.tiles.block import HALF_DTYPE, TRITON, Block, ColumnGradients, Needs
from megabatch.tiles.sums import LogSum
from megabatch_train.towers.layers import attention_kernels

SHARED_MEMORY = {capability: generation.shared_memory for capability, generation in kernel_plan.GENERATIONS.items()}

TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint64: "u64",
}


COMPILED = {}
OVERLAPPING = ("_logsumexp_kernel", "_maxima_kernel", "_maxsim_kernel")  # their speed needs products that do not wait


class Compiles:
    """Replaces a kernel: a launch compiles it and does not run it."""

    def __init__(self, kernel, target, source=ASTSource):
        self.kernel, self.target, self.source, self.arg_names = kernel, target, source, kernel.arg_names

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps=4, num_stages=3, enable_fp_fusion=True, **constants):
        given = dict(zip(self.kernel.arg_names, args, strict=False)) | constants
        signature = {name: self.type_of(given[name], name in constants) for name in self.kernel.arg_names}
        constexprs = {name: value for name, value in given.items() if signature[name] == "constexpr"}
        passed = [(i, name) for i, name in enumerate(self.kernel.arg_names) if signature[name] != "constexpr"]
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in passed if self.is_aligned(given[name])}
        key = (self.kernel.__name__, str(signature), str(constexprs), str(aligned))
        if key not in COMPILED:
            source = self.source(self.kernel, signature, constexprs, aligned)
            options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": enable_fp_fusion}
            built = triton.compile(source, target=self.target, options=options)
            # Triton 3.6 folds `lane & 31` and `4 * lane` into one shift by 31, and reads from wrong addresses.
            assert ", 2147483648;" not in built.asm["ptx"], f"{self.kernel.__name__} computes addresses wrongly"
            assert built.metadata.shared <= SHARED_MEMORY[self.target.arch], "more shared memory than the chip has"
            if self.target.arch == 90 and self.kernel.__name__ in OVERLAPPING:
                # ptxas serialises products silently, unless asked: top-k ran at 0.7 of the speed for it.
                assert "serialized" not in remarks(built.asm["ptx"]), f"products of {self.kernel.__name__} wait for one another"
            COMPILED[key] = built
            kind = given.get("KIND")
            print(self.kernel.__name__, getattr(kind, "value", kind), built.metadata.shared, "bytes shared")

    @staticmethod
    def is_aligned(value):
        """Whether a launch would tell the compiler that a pointer or number is a multiple of 16."""
        return isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0)

    @staticmethod
    def type_of(value, constant):
        if constant or value is None or (type(value) is int and value == 1):  # a launch compiles a number 1 in
            return "constexpr"
        if hasattr(value, "block_shape"):  # a tensor descriptor; Gluon's has a layout
            layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
            return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}{layout}>"
        if isinstance(value, torch.Tensor):
            return "*" + TYPES[value.dtype]
        return "fp32" if isinstance(value, float) else "i32"


def remarks(ptx: str) -> str:
    """What ptxas says of a kernel for Hopper."""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [ptxas, "-arch=sm_90a", "-v", source, "-o", source.with_suffix(".cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stderr


def main(capability: int, precision: str, features: bool) -> None:
    target = GPUTarget("cuda", capability, 32)
    kernel_plan.shared_memory = lambda device: SHARED_MEMORY[capability]
    with_gluon = capability == 90 and kernel_plan.compiles_gluon()
    kernel_plan.has_copy_engine = lambda device: capability >= 90
    kernel_plan.has_gluon = lambda device: with_gluon
    kernels = (
        (logsumexp, "_logsumexp_kernel"),
        (logsumexp, "_online_logsumexp_kernel"),
        (gradient, "_gradient_strip_kernel"),
        (ranking, "_rank_kernel"),
        (ranking, "_maxima_kernel"),
        (late_kernels, "_maxsim_kernel"),
        (late_kernels, "_query_gradient_kernel"),
        (late_kernels, "_count_kernel"),
        (late_kernels, "_list_kernel"),
        (late_kernels, "_listed_gradient_kernel"),
        (late_small, "_loss_kernel"),
        (late_small, "_total_kernel"),
        (late_small, "_part_list_kernel"),
        (late_small, "_document_kernel"),
        (late_small, "_query_kernel"),
        (late_small, "_candidate_kernel"),
        (ranking, "_group_products_kernel"),
        (ranking, "_choice_kernel"),
        (operands, "_largest_norms_kernel"),
        (operands, "_exponent_scale_kernel"),
        (operands, "_matching_products_kernel"),
        (operands, "_finish_gradient_kernel"),
        (operands, "_add_partial_sums_kernel"),
        (two_models, "_soft_sums_kernel"),
        (two_models, "_soft_gradient_kernel"),
        (two_models, "_guided_logsumexp_kernel"),
        (two_models, "_guided_gradient_kernel"),
        (pairs, "_pair_statistics_kernel"),
        (pairs, "_finish_pairs_kernel"),
        (pairs, "_sigmoid_matches_kernel"),
        (small_gradients, "partial_sums_kernel"),
        (small_gradients, "combine_kernel"),
        (small_gradients, "softmax_weights_kernel"),
        (small_gradients, "rows_kernel"),
        (small_gradients, "sigmoid_kernel"),
        (small_gradients, "_finish_kernel"),
        (operands, "_multiply_kernel"),
        (attention_kernels, "_attention_kernel"),
        (attention_kernels, "_attention_gradient_kernel"),
    )
    for module, name in kernels:
        setattr(module, name, Compiles(getattr(module, name), target))
    if with_gluon:
        from triton.experimental.gluon._runtime import GluonASTSource

        from megabatch.kernels import hopper as gluon

        gluon._warp_specialized_kernel = Compiles(gluon._warp_specialized_kernel, target, GluonASTSource)
    dense.round_to_precision = lambda values, precision: values  # as on a GPU, where inputs of half precision are not widened
    launch_small(precision, features, N=300)
    launch_small(precision, features, N=320)
    plan.KERNEL_MATMUL_ROWS = 300
    launch_small(precision, features, N=320)  # products by the library
    launch_all(512, precision, features)
    if precision == "float32":
        launch_all(512, precision, features, N=320)  # a multiple of 16, which allows wider loads
    if capability == 90 and not features:
        launch_all(768, precision, features)  # a part of the columns stays in shared memory
        launch_all(1152, precision, features)  # four or five steps of eighteen stay there
        launch_all(1600, precision, features)  # too wide for the warp-specialised kernel
    print("compiled", len(COMPILED))


def make_ids(N: int) -> torch.Tensor:
    """One id for each row, or two."""
    return torch.arange(2 * N).view(N, 2) if "two_columns" in sys.argv else torch.arange(N)


def launch_small(precision: str, features: bool, N: int, D: int = 512) -> None:
    """Losses of small batches, of every kind."""
    x, y = torch.randn(2, N, D).to(HALF_DTYPE.get(precision, torch.float32)).requires_grad_()
    small_gradients.launches_of.cache_clear()
    scale = torch.tensor(1.0, requires_grad=True)
    ids = make_ids(N) if features else None
    bias, labels = torch.tensor(-5.0, requires_grad=True), torch.arange(N) // 2
    options = {"ids_are_positives": features, "mean": True}
    run = Execution(precision, TRITON, "")
    for module in (dense, one_gpu):
        for columns in (False, True):
            loss = module.cross_entropy_loss(x, y, scale, ids, run, columns=columns, mean=True)
            torch.autograd.grad(loss, (x, scale))
        for fits in (True, False):
            plan.fits_one_square = lambda N, element_size, fits=fits: fits
            torch.autograd.grad(module.nt_xent_loss(x, y, scale, run, mean=True), (x, scale))
        torch.autograd.grad(module.sigmoid_loss(x, y, scale, bias, ids, run, **options), (x, scale, bias))
        torch.autograd.grad(module.sup_con_loss(x, labels, scale, run, mean=True), (x, scale))
    with torch.no_grad():
        for columns in (False, True):
            dense.cross_entropy_loss(x, y, scale, ids, run, columns=columns, mean=True)
    loss = one_gpu.sigmoid_loss(x, y.detach(), scale.detach(), bias, ids, run, **options)
    torch.autograd.grad(loss, bias)


def launch_all(D: int, precision: str, features: bool, N: int = 300) -> None:
    """Calls every launcher. At N = 300 the last, incomplete tile of rows has its own launch."""
    dtype = getattr(torch, precision, torch.float32)
    x, y = torch.randn(2, N, D).to(dtype)
    ids, bias = make_ids(N), torch.zeros(N)
    extra = {"row_bias": bias, "col_bias": bias, "row_ids": ids, "col_ids": ids} if features else {}
    block = Block(x, y, torch.tensor(1.0), precision, skip_diagonal=True, **extra)
    needs = Needs(True, True, True, features, features)
    sums = ColumnGradients(torch.zeros(N, D), bias if features else None)
    operands.matching_products(block)
    logsumexp.logsumexp_statistics(block)
    one = torch.ones(N)
    for strip in gradient.logsumexp_gradients(block, LogSum(one, one), LogSum(one, one), one, one, sums, needs):
        operands.finish_rows(strip.dx, x.clone(), one[0], own=x, partners=y, dmatch=one, precision=precision)
    for _ in gradient.softplus_gradients(block, one, sums, needs, total=one):
        pass
    gradient.softplus_sums(block)
    alone = replace(block, limit=bias if features else None)  # without columns
    logsumexp.logsumexp_statistics(alone, columns=False)
    for _ in gradient.logsumexp_gradients(alone, LogSum(one, one), None, one, None, sums, needs):
        pass
    if features:
        positives = Block(x, y, torch.tensor(1.0), precision, bias, None, ids, ids, ids_are_positives=True)
        for _ in gradient.softplus_gradients(positives, one, sums, Needs(True, True, True, True), total=one):
            pass
    if features:
        plain = Block(x, y, torch.tensor(1.0), precision)
        row, col = two_models.soft_statistics(replace(plain, second_model=plain))
        for _ in two_models.soft_gradients(
            replace(plain, second_model=plain), row, col, one, one, sums, Needs(True, True, True)
        ):
            pass
        for guided in (replace(alone, second_model=plain), replace(plain, limit=bias, second_model=plain)):
            row = two_models.row_statistics(guided)
            for _ in two_models.row_gradients(guided, row, one, sums, needs):
                pass
        if precision in HALF_DTYPE:  # weights in half precision, as on a device
            eager.rounds_gradients = two_models.rounds_gradients = lambda block: True
            eager.matmul_dtype = lambda precision, device: HALF_DTYPE[precision]
            without = ColumnGradients(sums.dy, None)
            for _ in two_models.row_gradients(guided, row, one, without, Needs(True, True, True)):
                pass
    if not features:
        ranking.rank_counts(Block(x, y, torch.tensor(1.0), precision))
    launch_late(precision, dtype, features)
    if precision in HALF_DTYPE:
        launch_attention(dtype, causal=features)
    for group in (8, None):
        numbers = torch.arange(N) if features else None  # of one column, in a search
        searched = replace(alone, row_bias=None, col_bias=None, row_ids=numbers, col_ids=numbers)
        ranking._search(searched, 2, group)


def launch_late(precision: str, dtype: torch.dtype, features: bool) -> None:
    """Late interaction: padded items as ColBERT's, or packed ones with holes whose vectors are wider than a step."""
    D = 160 if features else 128
    valid = torch.ones(256, dtype=torch.bool) if features else None
    lengths = torch.full((8,), 32) if features else None
    tokens = TokenRows(torch.randn(256, D).to(dtype), 32, lengths, valid)
    block = LateBlock(
        tokens, replace(tokens, max_length=64, lengths=None if lengths is None else lengths), torch.ones(()), precision
    )
    for _ in late_kernels.score_tiles(block):
        pass
    late_kernels.add_gradients(block, lambda s, rows, columns: s, torch.zeros(256, D), torch.zeros(256, D))
    values = [tokens.values.clone().requires_grad_() for _ in range(2)]
    weight = tokens.weights().float() if features else None
    sides = [replace(tokens, values=side) for side in values]
    pairs = LateBlock(*sides, torch.ones((), dtype=torch.float64), precision, weight)
    loss = late_small.loss_of_pairs(pairs, torch.arange(8) if features else None, 0.5, symmetric=features)
    with torch.no_grad():  # stores no gradients of the scores
        late_small.loss_of_pairs(pairs, None, 0.5, symmetric=True)
    torch.autograd.grad(loss, values)
    with torch.no_grad():
        late_small.candidate_scores(pairs, torch.zeros(8, 3, dtype=torch.int64))


def launch_attention(dtype: torch.dtype, causal: bool) -> None:
    """Attention of compiled towers, for each size of the blocks of tokens."""
    for tokens in (7, 24, 50, 128):
        projected = torch.randn(2, tokens, 3 * 128).to(dtype)
        attention_kernels.forward(projected, 2, causal)
        attention_kernels.backward(projected, torch.randn(2, tokens, 128).to(dtype), 2, causal)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], "features" in sys.argv)

"""Launches that are repeated, with a kernel and a compiled kernel that only note how they are called."""

from types import SimpleNamespace

import pytest
import torch

triton_launcher = pytest.importorskip("megabatch.kernels.launch")


class Compiled(triton_launcher.CompiledKernel):
    function, packed_metadata = "function", "metadata"

    def __init__(self, calls):
        self.module, self.calls = None, calls
        self._run = lambda *arguments: self.calls.append(("compiled", *arguments))

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append(("compiled with hooks", grid, arguments))


class Kernel:
    arg_names = ("x", "y", "N", "BLOCK")

    def __init__(self, calls, result):
        self.calls, self.result = calls, result

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.calls.append(("kernel", grid, arguments, options))
            return self.result

        return launch


@pytest.fixture(autouse=True)
def hooks(monkeypatch):
    """Of a Triton whose `run` is known, without hooks for launches; device 3 is current, and its stream is 30."""
    found = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=None)
    active = SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: 10 * device)
    monkeypatch.setattr(triton_launcher, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=found)))
    monkeypatch.setattr(triton_launcher, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(triton_launcher, "_CAN_CALL_RUN", True)
    return found


def test_a_compiled_kernel_is_launched_again_by_position():
    calls = []
    launch = triton_launcher.Launcher(Kernel(calls, Compiled(calls)), (7,), (5,), BLOCK=16, num_warps=8)
    x = torch.zeros(5)
    for _ in range(3):
        launch(x, None)
    assert calls[0] == ("kernel", (7,), (x, None, 5), {"BLOCK": 16, "num_warps": 8})
    address = x.data_ptr()
    assert calls[1:] == [("compiled", 7, 1, 1, 30, "function", "metadata", None, None, None, address, None, 5, 16)] * 2


def test_descriptors_are_passed_as_they_are():
    calls = []
    launch = triton_launcher.Launcher(Kernel(calls, Compiled(calls)), (7,), (5,), BLOCK=16)
    x, descriptor = torch.zeros(5), SimpleNamespace(base=torch.zeros(5))
    for _ in range(2):
        launch(x, descriptor)
    assert calls[1][10] is x
    assert calls[1][11] is descriptor


def test_hooks_for_launches_are_left_to_triton(hooks):
    calls = []
    launch = triton_launcher.Launcher(Kernel(calls, Compiled(calls)), (7,), (5,), BLOCK=16)
    chain = hooks.launch_enter_hook.calls
    for change in (None, None, lambda: chain.append(print), chain.clear, lambda: setattr(hooks, "launch_exit_hook", print)):
        if change is not None:
            change()
        launch(None, None)
    with_hooks = "compiled with hooks", (7, 1, 1), (None, None, 5, 16)
    assert calls[2] == calls[4] == with_hooks
    assert [call[0] for call in calls] == ["kernel", "compiled", with_hooks[0], "compiled", with_hooks[0]]


def test_an_unknown_triton_launches_its_own_way(monkeypatch):
    monkeypatch.setattr(triton_launcher, "_CAN_CALL_RUN", False)
    calls = []
    launch = triton_launcher.Launcher(Kernel(calls, Compiled(calls)), (7,), (5,), BLOCK=16)
    for _ in range(2):
        launch(None, None)
    assert calls[1] == ("compiled with hooks", (7, 1, 1), (None, None, 5, 16))


def test_an_interpreted_kernel_is_launched_as_ever():
    calls = []
    launch = triton_launcher.Launcher(Kernel(calls, None), (7, 2), (5,), BLOCK=16)
    for _ in range(2):
        launch(None, None)
    assert calls == [("kernel", (7, 2), (None, None, 5), {"BLOCK": 16})] * 2


def test_arguments_in_another_order_are_refused():
    with pytest.raises(AssertionError, match="by position"):
        triton_launcher.Launcher(Kernel([], None), (1,), (16,), N=5)
    with pytest.raises(AssertionError):
        triton_launcher.Launcher(Kernel([], None), (1,), (5,), BLOCK=16)(None)


def test_kinds_tell_types_and_alignment():
    values = torch.zeros(9, dtype=torch.bfloat16)
    aligned, shifted = triton_launcher.kinds(values[:8], values[1:])
    assert aligned == (torch.bfloat16, True)
    assert shifted == (torch.bfloat16, False)
    assert triton_launcher.kinds(None) == (None,)


def test_launchers_of_descriptors_are_kept_by_type_and_block():
    descriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor.from_tensor
    calls = []
    kernel = Kernel(calls, Compiled(calls))
    values = torch.zeros(32, 16)
    for tensor, block in [(values, [8, 16]), (values[:16], [8, 16]), (values, [16, 16]), (values.half(), [8, 16])]:
        triton_launcher.launch(kernel, (1,), (None, descriptor(tensor, block)), (5,), BLOCK=16)
    assert [call[0] for call in calls] == ["kernel", "compiled", "kernel", "kernel"]  # the first two differ in their shape only


def test_launchers_are_kept_for_arguments_of_the_same_kinds():
    calls = []
    kernel = Kernel(calls, Compiled(calls))
    values = torch.zeros(9)
    for x in (values, values[4:], values[1:], values.double()):  # the first two have the same type and alignment
        triton_launcher.launch(kernel, (1,), (x, None), (5,), BLOCK=16)
    assert [call[0] for call in calls] == ["kernel", "compiled", "kernel", "kernel"]
    triton_launcher.launch(kernel, (1,), (values, values), (5,), BLOCK=16)
    triton_launcher.launch(kernel, (1,), (values, None), (6,), BLOCK=16)
    triton_launcher.launch(kernel, (1,), (values, None), (5,), BLOCK=32)
    assert [call[0] for call in calls[4:]] == ["kernel"] * 3


def test_few_launchers_are_kept(monkeypatch):
    monkeypatch.setattr(triton_launcher, "_LAUNCHERS", {})
    monkeypatch.setattr(triton_launcher, "_MAX_LAUNCHERS", 3)
    kernel = Kernel([], None)
    for size in range(8):
        triton_launcher.launch(kernel, (1,), (torch.zeros(1), None), (size,), BLOCK=16)
        assert len(triton_launcher._LAUNCHERS) <= 3

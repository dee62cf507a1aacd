"""A device type for tests that is neither "cuda" nor "cpu". It computes in CPU memory and, like MPS, has no float64."""

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import torch

SOURCE = Path(__file__).with_suffix(".cpp")
NAME = "other"


class OtherDevice(ModuleType):
    """`torch.other`: the functions that PyTorch asks of a device module, with a random generator of its own."""

    def __init__(self):
        super().__init__(f"torch.{NAME}")
        self.generator = torch.Generator().manual_seed(0)

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def set_device(self, device):
        pass

    def synchronize(self, device=None):
        pass

    def _is_in_bad_fork(self):
        return False

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed):
        self.generator.manual_seed(seed)

    manual_seed = manual_seed_all

    def get_rng_state(self, device=None):
        return self.generator.get_state()

    def set_rng_state(self, state, device=None):
        self.generator.set_state(state)


def build(folder):
    """Compiles the device and makes PyTorch load it. This process keeps it until it ends."""
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler is not None, "a C++ compiler is needed"
    home = Path(importlib.util.find_spec("torch").origin).parent
    library = Path(folder, "other_device.so")
    includes = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    links = [f"-L{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    standard = "-std=c++20" if torch.__version__ >= (2, 10) else "-std=c++17"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    command = [compiler, standard, "-O0", "-w", "-fPIC", "-shared", abi, *includes, str(SOURCE), "-o", str(library), *links]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    torch.utils.rename_privateuse1_backend(NAME)
    module = OtherDevice()
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.ops.load_library(str(library))

    def draw_mask(values, p):
        return (torch.rand(values.shape, generator=module.generator) >= p).to(values.device)

    def native_dropout(values, p, train):
        mask = draw_mask(values, p if train else 0.0)
        return values * mask / (1 - p), mask

    global _library
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("native_dropout", native_dropout, "PrivateUse1")
    return module


_library = None  # an operator is removed with its library

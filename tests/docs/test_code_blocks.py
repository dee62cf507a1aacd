"""Every code block of README.md and the guides: Python runs as written, commands are ones that the command line takes.

The blocks of a page share their names, in order. What a page takes for granted is in code_blocks.py and in `PREPARED`, tiny;
numbers of rows that a block draws are cut down.
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megabatch_train import cli, settings
from megabatch_train.commands import find_command
from megabatch_train.trainer.config import resolve

sys.path.insert(0, str(Path(__file__).parent))
import code_blocks

ROWS = 64
NEEDS = {
    "integrations": ("open_clip", "accelerate", "lightning", "transformers"),
    "sentence_transformers": ("sentence_transformers", "datasets", "accelerate"),
    "runs": ("open_clip", "sentence_transformers"),
    "tutorial_text": ("sentence_transformers",),
}
AROUND = {"README": "group", "cached": "group", "ring": "group", "many_gpus": "launched"}  # fixtures
PYTHON = [path for path in code_blocks.FILES if any(block.language == "python" for block in code_blocks.blocks(path))]


@pytest.fixture
def small(monkeypatch):
    """Tensors of random numbers have few rows where a thousand or more were asked for."""
    draw = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: draw(*(n if n < 1000 else ROWS for n in shape), **options))


@pytest.fixture
def group():
    """This process as the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def launched(monkeypatch):
    """The variables that torchrun sets."""
    from ranks import free_port

    values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def runs(folder, monkeypatch):
    """Models in the folders that the page names, one of them by the name of a large one of open_clip's."""
    import open_clip

    import pairs
    from megabatch_train import towers

    layers = {"width": 16, "layers": 1, "heads": 2}
    config = {
        "embed_dim": 8,
        "vision_cfg": {"image_size": 32, "patch_size": 16, "width": 16, "layers": 1, "head_width": 8},
        "text_cfg": {"context_length": 8, "vocab_size": 49408, **layers},
    }
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "ViT-B-32", config)
    towers.save(towers.load("small"), folder / "runs/emoji")
    towers.save(towers.load("open_clip:ViT-B-32"), folder / "runs/flickr")
    save_text_model(folder, folder / "runs/qa")
    pairs.write_pair(folder / "siglip", "Siglip")
    towers.save(towers.load(f"hf:{folder / 'siglip'}"), folder / "runs/siglip")
    return {}


def tutorial_text(folder, monkeypatch):
    """The exported model, in tiny."""
    save_text_model(folder, folder / "finetuned")
    return {}


def tutorial_own_tower(folder, monkeypatch):
    """The module of the page, and a run with its towers."""
    from megabatch_train import towers

    page = code_blocks.blocks(code_blocks.ROOT / "docs" / "tutorial_own_tower.md")
    (folder / "curves.py").write_text(next(block.code for block in page if "def build" in block.code))
    monkeypatch.setattr(sys, "path", list(sys.path))
    towers.save(towers.load("python:curves:build", ("value", "text")), folder / "runs/curves")
    return {}


def save_text_model(config, output):
    from megabatch_train import towers

    bert = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    (config / "config.json").write_text(json.dumps({**bert, "vocab_size": 9}))
    (config / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\nmoon\n")
    (config / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    towers.save(towers.load(f"hf-config:{config}", ("text", "text")), output)


def test_links_of_the_readme_are_whole_addresses_of_files():
    """A package index shows the README without the repository."""
    links = re.findall(r"\]\(([^)\s]+)\)", (code_blocks.ROOT / "README.md").read_text("utf-8"))
    own = [re.fullmatch(r"https://[\w.]+/megabatch/megabatch/(?:blob/)?main/(.+)", link) for link in links]
    assert all(link.startswith("https://") for link in links)
    assert sum(link is not None for link in own) > 10
    assert all((code_blocks.ROOT / link[1].partition("#")[0]).is_file() for link in own if link is not None)


def training(folder, monkeypatch):
    """Drawings of noise, no more than a batch, and one step."""
    from megabatch_train.data import demo, paths
    from megabatch_train.trainer import config

    names = [f"thing {i}" for i in range(700)]  # two thirds of their drawings are to train on
    drawings = torch.randint(256, (len(names), 2, 3, 32, 32), dtype=torch.uint8)
    monkeypatch.setattr(paths, "folder", lambda: folder)
    monkeypatch.setattr(demo, "_render_all", lambda size: {"names": names, "drawings": drawings})
    monkeypatch.setattr(config, "recipe", lambda model, data: {"epochs": 1.0, "schedule": {"warmup_steps": 0}})
    return {}


def sentence_transformers(folder, monkeypatch):
    from datasets import Dataset

    import sentences

    return {
        "model": sentences.tiny_model(folder / "model"),
        "guide": sentences.tiny_model(folder / "guide", seed=7),
        "pairs": Dataset.from_dict(sentences.columns(12, hard=1)),
    }


def integrations(folder, monkeypatch):
    """A tiny model of open_clip, whose trainer is not started, and one with two towers for Accelerate."""
    from types import SimpleNamespace

    import open_clip
    from accelerate import Accelerator

    import clips

    for name in ("ClipLoss", "SigLipLoss", "DistillClipLoss"):  # which `install` replaces
        monkeypatch.setattr(open_clip.factory, name, getattr(open_clip.factory, name))
    monkeypatch.setitem(sys.modules, "open_clip_train.main", SimpleNamespace(main=lambda arguments: None))
    model, (images, texts) = clips.model(), clips.batch(code_blocks.PAIRS, seed=0)
    pairs = code_blocks.Towers()
    pairs.log_scale = torch.nn.Parameter(torch.tensor(2.7))

    class Prepares(Accelerator):
        def prepare(self, *of_the_page):
            data = [(torch.randn(code_blocks.PAIRS, 48), torch.randn(code_blocks.PAIRS, 24))]
            return *super().prepare(pairs, torch.optim.AdamW(pairs.parameters())), data

    return {
        "rank": 0,
        "world_size": 1,
        "model": model,
        "images": images,
        "texts": texts,
        "scaler": None,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "accelerator": Prepares(cpu=True),
        "data": None,
    }


PREPARED = {
    "integrations": integrations,
    "runs": runs,
    "training": training,
    "sentence_transformers": sentence_transformers,
    "tutorial_own_tower": tutorial_own_tower,
    "tutorial_text": tutorial_text,
}


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*QuickGELU", "ignore:.*pin_memory:UserWarning")
def test_python(path, tmp_path, monkeypatch, small, request):
    for package in NEEDS.get(path.stem, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    if path.stem in AROUND:
        request.getfixturevalue(AROUND[path.stem])
    names = code_blocks.given() | PREPARED.get(path.stem, lambda *_: {})(tmp_path, monkeypatch)
    for block in code_blocks.blocks(path):
        if block.language == "python":
            code = "\n" * (block.line - 1) + block.code  # so that a traceback names the line of the page
            exec(compile(code, str(path), "exec"), names)


def commands(code):
    """The lines, those that go on with a backslash as one, without comments; what is indented is what a command prints."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words and not line.startswith(" "):
            yield words


def arguments_of_megabatch(words):
    """What the command line gets, also through torchrun; None where it is another command."""
    if words[0] == "megabatch":
        return words[1:]
    for i in range(len(words) - 1):
        if words[i : i + 2] == ["-m", "megabatch"]:
            return words[i + 2 :]
    return None


def parsed(arguments):
    """As `cli.main` does before it runs a command."""
    parser, subparser = cli._parser(arguments[0])
    find_command(arguments[0]).add_arguments(subparser)
    return parser.parse_args(arguments)


SHELL = [
    pytest.param(words, id=f"{path.stem}:{block.line}:{' '.join(words)[:40]}")
    for path in code_blocks.FILES
    for block in code_blocks.blocks(path)
    if block.language in ("", "bash")
    for words in commands(block.code)
]


@pytest.mark.parametrize("words", SHELL)
def test_commands(words):
    arguments = arguments_of_megabatch(words)
    if arguments is not None:
        assert isinstance(parsed(arguments), argparse.Namespace)
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (code_blocks.ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
    elif words[0] == "python":
        assert (code_blocks.ROOT / words[1]).exists()


def test_a_wrong_command_is_found():
    with pytest.raises(SystemExit):
        parsed(["train", "--batchsize", "3"])


def test_other_languages(tmp_path):
    """Slurm's is a script that bash can read, Kubernetes' is YAML, settings are TOML, text is what a command prints."""
    seen = set()
    for path in code_blocks.FILES:
        for block in code_blocks.blocks(path):
            seen.add(block.language)
            if block.language == "toml":
                (tmp_path / "run.toml").write_text(block.code)
                resolve(settings.read(tmp_path / "run.toml"))
            if block.language == "bash" and shutil.which("bash"):
                subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
            if block.language == "yaml":
                kinds = [document["kind"] for document in pytest.importorskip("yaml").safe_load_all(block.code)]
                assert kinds == ["Service", "Job"]
    assert seen == {"", "python", "bash", "yaml", "toml", "text"}

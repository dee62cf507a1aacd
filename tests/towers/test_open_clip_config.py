"""Config files of open_clip: a run does not depend on the file, and no file can choose code that runs."""

import json
import shutil
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import pairs
from megabatch_train import settings, towers
from megabatch_train.commands.train import _store_model_config
from megabatch_train.evaluation import encode
from megabatch_train.export import export
from megabatch_train.planning import models as planning
from megabatch_train.towers.models import WEIGHTS
from megabatch_train.towers.open_clip import CONFIG, find_architecture, read_config, split_name
from megabatch_train.towers.tower import allow_remote_code
from megabatch_train.trainer.config import TrainConfig

TINY = {
    "embed_dim": 8,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 32, "patch_size": 16, "width": 16, "layers": 1, "head_width": 8},
    "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 16, "layers": 1, "heads": 2},
}
SAMPLES = [torch.full((3, 20, 24), 99, dtype=torch.uint8)], ["a dog " * 20, "a cat"]


@pytest.fixture
def run(tmp_path):
    """A model of a config file that is saved as a run, and its embeddings. The file does not exist any more."""
    pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
    file = tmp_path / "ViT-B-32.json"  # a name that open_clip has too
    file.write_text(json.dumps(TINY))
    torch.manual_seed(0)
    pair = towers.load(f"open_clip:{file}")
    for module in pair.modules:
        module.eval()
    towers.save(pair, tmp_path / "run")
    file.unlink()
    return tmp_path / "run", embeddings(pair)


def embeddings(pair):
    return [encode(tower, samples) for tower, samples in zip(pair.towers, SAMPLES, strict=True)]


def test_a_run_keeps_its_own_config_and_tokenizer(run, tmp_path):
    import open_clip

    folder, wanted = run
    pair = towers.load_saved(folder)
    assert pair.second.collate([pair.second.prepare("a dog", None)])["text"].shape == (1, 12)
    assert open_clip.get_model_config("ViT-B-32")["embed_dim"] == 512  # still open_clip's own
    towers.save(pair, tmp_path / "again")
    for found in (pair, towers.load_saved(tmp_path / "again")):
        for one, other in zip(embeddings(found), wanted, strict=True):
            assert torch.equal(one, other)
    assert json.loads((tmp_path / "again" / CONFIG).read_text())["model_cfg"] == TINY


def test_a_run_keeps_a_tokenizer_of_transformers(tmp_path):
    pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
    pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
    pairs.write_pair(tmp_path / "tokenizer", "CLIP")
    text = {**TINY["text_cfg"], "vocab_size": 12, "hf_tokenizer_name": str(tmp_path / "tokenizer")}
    (tmp_path / "tiny.json").write_text(json.dumps({**TINY, "text_cfg": text}))
    pair = towers.load(f"open_clip:{tmp_path / 'tiny.json'}")
    towers.save(pair, tmp_path / "run")
    shutil.rmtree(tmp_path / "tokenizer")
    again = towers.load_saved(tmp_path / "run")
    tokens = [one.second.collate([one.second.prepare("a red cat", None)])["text"] for one in (pair, again)]
    assert torch.equal(*tokens)
    assert tokens[0][0, :5].tolist() == [2, 1, 7, 4, 3]


def test_export_to_transformers_and_to_open_clip(run, tmp_path):
    open_clip = pytest.importorskip("open_clip")
    transformers = pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
    folder, (_, texts) = run
    pair = towers.load_saved(folder)
    export(pair, "hf", tmp_path / "hf")
    tokenizer = transformers.CLIPTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.model_max_length == 12
    export(pair, "open_clip", tmp_path / "clip")
    model = open_clip.create_model(f"local-dir:{tmp_path / 'clip'}").eval()
    tokens = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'clip'}")(SAMPLES[1])
    with torch.no_grad():
        torch.testing.assert_close(model.encode_text(tokens, normalize=True), texts, rtol=1e-4, atol=1e-5)


def test_the_settings_of_a_run_have_the_contents_of_the_file(tmp_path):
    pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps({"model_cfg": TINY, "preprocess_cfg": {"mean": [0.1, 0.2, 0.3], "size": 7}}))
    config = _store_model_config(TrainConfig(model=f"open_clip:{file}"))
    assert read_config(str(file)) == config.model_options["config"]
    (tmp_path / "config.toml").write_text(settings.to_toml(settings.table(config)))
    file.write_text("something else")
    again = settings.build(TrainConfig, settings.read(tmp_path / "config.toml"))
    assert _store_model_config(again) == again == config
    pair = towers.load(again.model, **again.model_options)
    assert pair.first.module.model.visual.image_mean == [0.1, 0.2, 0.3]
    assert pair.first.module.model.context_length == 12


def test_prompts_of_the_run_that_weights_are_of(tmp_path):
    pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    pair = towers.load(f"open_clip:{tmp_path / 'tiny.json'}", document_prompt="a photo of ")
    towers.save(pair, tmp_path / "run")
    spec = f"open_clip:{tmp_path / 'tiny.json'}@{tmp_path / 'run' / WEIGHTS}"
    again = towers.load(spec)
    assert again.options == {"document_prompt": "a photo of "}
    assert torch.equal(embeddings(again)[1], embeddings(pair)[1])
    assert towers.load(spec, document_prompt="").second.prepare("x", None) != again.second.prepare("x", None)


def test_names():
    assert split_name("ViT-B-32") == ("ViT-B-32", "")
    assert split_name("ViT-B-32@openai") == ("ViT-B-32", "openai")
    assert split_name("a@b/c.json") == ("a@b/c.json", "")
    assert split_name("a/c.json@w.pt") == ("a/c.json", "w.pt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"text_cfg": {"tokenizer_kwargs": {"trust_remote_code": True}}},
            r"tokenizer_kwargs of clean, .*, got trust_remote_code",
        ),
        ({"vision_cfg": {"timm_model_name": "local-dir:/tmp"}}, r"an architecture of timm, got 'local-dir:/tmp'"),
        ({"vision_cfg": {"timm_model_name": "hf-hub:a/b"}}, r"an architecture of timm, got 'hf-hub:a/b'"),
        ({"vision_cfg": 3}, r"a config of open_clip with embed_dim, vision_cfg, text_cfg, got"),
        ({"vision_cfg": None}, r"a config of open_clip with embed_dim, vision_cfg, text_cfg, got"),
    ],
)
def test_configs_that_are_refused(run, tmp_path, change, message):
    wrong = {**TINY, **change}
    with pytest.raises(ValueError, match=message):
        towers.load("open_clip:wrong.json", config=json.dumps(wrong))
    (run[0] / CONFIG).write_text(json.dumps({"model_cfg": wrong}))
    with pytest.raises(ValueError, match=message):
        towers.load_saved(run[0])


def test_a_name_in_a_model_file_loads_nothing(run, tmp_path):
    folder, wanted = run
    evil = tmp_path / "evil"
    evil.mkdir()
    text = {**TINY["text_cfg"], "hf_tokenizer_name": "x", "tokenizer_kwargs": {"trust_remote_code": True}}
    (evil / CONFIG).write_text(json.dumps({"model_cfg": {**TINY, "text_cfg": text}}))
    (evil / "config.json").write_text(json.dumps({"model_type": "evil"}))
    auto = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["code.Evil", None]}}
    (evil / "tokenizer_config.json").write_text(json.dumps(auto))
    (evil / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with safe_open(folder / WEIGHTS, "pt") as file:
        header = json.loads(file.metadata()["megabatch"])
        weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for name in (f"open_clip:local-dir:{evil}", "open_clip:hf-hub:some/body"):
        save_file(weights, folder / WEIGHTS, {"megabatch": json.dumps({**header, "name": name})})
        for one, other in zip(embeddings(towers.load_saved(folder)), wanted, strict=True):
            assert torch.equal(one, other)
        with pytest.raises(ValueError, match=r"open_clip has no model"):
            find_architecture(name.partition(":")[2])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "config",
    [{"attn_implementation": "evil/kernels"}, {"text_config": {"_attn_implementation": {"": "evil/kernels@main:run"}}}],
)
def test_kernels_of_a_repository_need_a_flag(tmp_path, config):
    pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **config}))
    for spec in (f"hf:{tmp_path}", f"hf-config:{tmp_path}"):
        with pytest.raises(ValueError, match=r"names the kernels of 'evil/kernels.*--trust-remote-code downloads and runs"):
            towers.load(spec, ("text", "text"))


def test_kernels_of_a_text_tower_need_a_flag(run, tmp_path):
    pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
    (tmp_path / "bert").mkdir()
    bert = {"model_type": "bert", "hidden_size": 8, "num_attention_heads": 1, "attn_implementation": "evil/kernels"}
    (tmp_path / "bert" / "config.json").write_text(json.dumps(bert))
    text = {"hf_model_name": str(tmp_path / "bert"), "hf_tokenizer_name": "", "hf_proj_type": "linear"}
    wrong = {**TINY, "text_cfg": text}
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    (run[0] / CONFIG).write_text(json.dumps({"model_cfg": wrong}))
    loads = [
        lambda: towers.load(f"open_clip:{tmp_path / 'wrong.json'}"),
        lambda: towers.load_saved(run[0]),
        lambda: planning.model(f"open_clip:{tmp_path / 'wrong.json'}"),
    ]
    for load in loads:
        with pytest.raises(ValueError, match=r"names the kernels of 'evil/kernels'.*--trust-remote-code downloads and runs"):
            load()


def test_code_of_a_transformers_folder_needs_a_flag(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    auto = {"AutoConfig": "code.Config", "AutoModel": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    (tmp_path / "code.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nraise ImportError('it ran')\n"
    )
    for spec in (f"hf:{tmp_path}", f"hf-config:{tmp_path}"):
        with pytest.raises(
            ValueError, match=r"without custom code, got one whose files contain code: --trust-remote-code runs it"
        ):
            towers.load(spec, ("text", "text"))
    assert not (tmp_path / "ran").exists()
    with allow_remote_code(), pytest.raises(ImportError, match="it ran"):
        towers.load(f"hf-config:{tmp_path}", ("text", "text"))
    assert (tmp_path / "ran").exists()

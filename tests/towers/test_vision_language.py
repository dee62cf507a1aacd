"""Vision-language models as towers: equality with the model's own forward pass, gradients, options, hostile inputs."""

import json

import pytest
import torch
import torch.nn.functional as F

import decoders
import megabatch as mb
import vision_language
from decoders import Loss
from megabatch.world import World
from megabatch_train import towers
from megabatch_train.data.dataset import IMAGE, MIXED, TEXT, Content, UnreadableSampleError
from megabatch_train.data.media.images import EncodedImage, to_pillow
from megabatch_train.evaluation import encode
from megabatch_train.export import export
from megabatch_train.planning.models import model as plan_model
from megabatch_train.towers.tower import LoraConfig
from megabatch_train.towers.vision_language import VisionLanguageEncoder, inputs_of
from megabatch_train.trainer import build

transformers = pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
pytest.importorskip("torchvision")
FAMILIES = [family for family in vision_language.FAMILIES if hasattr(transformers.models, family)]
QUERIES, NEGATIVES = 7, 4
CONTENTS = [
    Content("one two", vision_language.image(30, 50)),
    Content("red cat"),
    Content("", vision_language.image(64, 20, 1)),
    Content("dog one two three", vision_language.image(16, 16, 2)),
]


def own_forward(folder, contents, prompt=""):
    """The normalized last hidden state of the last token, by the model and the processor of transformers."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    rows = []
    for text, image in contents:
        parts = [] if image is None else [{"type": "image", "image": to_pillow(image)}]
        parts += [{"type": "text", "text": text}] if text else []
        messages = [{"role": "system", "content": [{"type": "text", "text": prompt}]}] if prompt else []
        messages.append({"role": "user", "content": parts})
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
        with torch.no_grad():
            rows.append(model(**processor.apply_chat_template(messages, **options)).last_hidden_state[0, -1])
    return F.normalize(torch.stack(rows), dim=-1)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=3e-6)


def change(pair):
    """Weights as after some training."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in pair.parameters():
            if parameter.requires_grad:
                parameter += torch.randn(parameter.shape, generator=generator) / 20
    return pair


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_those_of_the_model_itself(tmp_path, family):
    """Before training, after it, after saving and after the export, which sentence-transformers can load too."""
    folder = vision_language.save(tmp_path / "base", family)
    pair = towers.load(f"hf:{folder}", (TEXT, MIXED), query_prompt="query : ")
    before = encode(pair.second, CONTENTS)
    assert (before @ before.T).triu(1).max() < 0.99
    close(before, own_forward(folder, CONTENTS))
    close(encode(pair.first, ["red cat"]), own_forward(folder, CONTENTS[1:2], "query : "))
    change(pair)
    trained = encode(pair.second, CONTENTS)
    assert (trained - before).abs().max() > 0.01
    towers.save(pair, tmp_path / "run")
    loaded = towers.load_saved(tmp_path / "run")
    assert (loaded.first.kind, loaded.second.kind) == (TEXT, MIXED)
    close(encode(loaded.second, CONTENTS), trained)
    close(encode(loaded.first, ["red cat"]), encode(pair.first, ["red cat"]))
    export(loaded, "hf", tmp_path / "exported")
    close(own_forward(tmp_path / "exported", CONTENTS), trained)
    again = towers.load(f"hf:{tmp_path / 'exported'}", (TEXT, MIXED))
    assert again.options["query_prompt"] == "query : "
    assert again.options["pooling"] == "last"
    close(encode(again.first, ["red cat"]), encode(pair.first, ["red cat"]))


def test_sentence_transformers_loads_an_export(tmp_path):
    library = pytest.importorskip("sentence_transformers", minversion="6.0")
    pair = change(towers.load(f"hf:{vision_language.save(tmp_path / 'base')}", (TEXT, MIXED), query_prompt="query : "))
    export(pair, "hf", tmp_path / "exported")
    model = library.SentenceTransformer(str(tmp_path / "exported"), device="cpu")
    close(torch.from_numpy(model.encode_query(["red cat"])), encode(pair.first, ["red cat"]))
    for content, wanted in zip(CONTENTS, encode(pair.second, CONTENTS), strict=True):
        parts = {"image": None if content.image is None else to_pillow(content.image), "text": content.text or None}
        given = {key: value for key, value in parts.items() if value is not None}
        close(torch.from_numpy(model.encode_document([given]))[0], wanted)


@pytest.mark.parametrize("merge", [True, False])
def test_adapters_are_saved_and_exported(tmp_path, merge):
    pytest.importorskip("peft", reason='pip install "megabatch[huggingface]"')
    folder = vision_language.save(tmp_path / "base")
    pair = change(towers.load(f"hf:{folder}", (MIXED, MIXED), lora=LoraConfig(2, merge=merge)))
    wanted = encode(pair.first, CONTENTS)
    assert (wanted - own_forward(folder, CONTENTS)).abs().max() > 0.01
    towers.save(pair, tmp_path / "run")
    close(encode(towers.load_saved(tmp_path / "run").first, CONTENTS), wanted)
    export(pair, "hf", tmp_path / "exported")
    close(own_forward(tmp_path / "exported", CONTENTS), wanted)


# Gradients


def same(found, wanted):
    assert found[1].keys() == wanted[1].keys()
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-10, atol=1e-11)
    reached = 0
    for name, gradient in wanted[1].items():
        reached += bool(gradient.abs().max() > 1e-8)
        torch.testing.assert_close(
            found[1][name], gradient, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name} {text}"
        )
    assert reached > 0.9 * len(wanted[1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("lora", "budget"), [(2, None), (0, 20000)])
def test_a_cached_step_is_the_plain_step(family, lora, budget):
    """Images of different sizes, texts, hard negatives; the samples come by replay, sorted by their number of tokens."""
    if lora:
        pytest.importorskip("peft", reason='pip install "megabatch[huggingface]"')
    wanted = vision_language.plain(vision_language.adapted(family, lora), QUERIES, NEGATIVES)
    pair = vision_language.adapted(family, lora)
    sources = [vision_language.replay(pair.first, side) for side in vision_language.batch(QUERIES, NEGATIVES)]
    assert sources[1].lengths.max() > 3 * sources[1].lengths.min()
    steps = [(pair.first.module, source) for source in sources]
    loss = mb.cached_backward(Loss(), steps, chunk_size=2, budget=budget)
    same((loss, decoders.gradients(pair.first.module)), wanted)


def test_dropout_of_adapters_is_the_same_in_both_passes():
    pytest.importorskip("peft", reason='pip install "megabatch[huggingface]"')
    found = []
    for budget in ("all", None):
        pair = vision_language.adapted(dropout=0.5)
        pair.first.module.train()
        torch.manual_seed(5)
        sources = [vision_language.replay(pair.first, side) for side in vision_language.batch(QUERIES, NEGATIVES)]
        loss = mb.cached_backward(Loss(), [(pair.first.module, one) for one in sources], chunk_size=2, budget=budget)
        found.append((loss, decoders.gradients(pair.first.module)))
    same(found[0], found[1])


def on_rank(group, rank, family, parallel, counts, checkpointing):
    """A step as one rank. The samples of the second rank have no images."""
    pair = vision_language.adapted(family, 2)
    encoder = pair.first.module
    towers.tower.set_checkpointing([encoder], checkpointing)
    images = [pair.first.collate([pair.first.prepare(content, None) for content in CONTENTS[:2]])]
    (called,) = build.wrap([encoder], images, World(torch.device("cpu"), group), parallel)
    queries, second = ranked_batch(counts)
    begin, end = (sum(counts[0][: rank + i]) for i in (0, 1))
    hard = [sum(counts[0]) + sum(counts[1][: rank + i]) for i in (0, 1)]
    own = [*second[begin:end], *second[slice(*hard)]]
    sides = [(called, vision_language.replay(pair.first, side)) for side in (queries[begin:end], own)]
    loss = mb.cached_backward(Loss(group), sides, chunk_size=2, budget=None)
    return loss, decoders.gradients(encoder)


def ranked_batch(counts):
    """The batch of all ranks, in which the second rank has only texts."""
    queries, second = vision_language.batch(sum(counts[0]), sum(counts[1]))
    for i in range(counts[0][0], counts[0][0] + counts[0][1]):
        queries[i], second[i] = Content(f"one {i}"), Content("two dog")
    for i in range(sum(counts[0]) + counts[1][0], sum(counts[0]) + sum(counts[1][:2])):
        second[i] = Content("blue")
    return queries, second


@pytest.mark.thorough  # three processes import transformers and PEFT
@pytest.mark.parametrize(
    ("family", "parallel", "checkpointing"),
    [("qwen2_vl", "ddp", False), ("qwen2_5_vl", "fsdp", True), ("qwen3_vl", "fsdp", False)],
)
def test_three_ranks_are_one(pool, monkeypatch, family, parallel, checkpointing):
    pytest.importorskip("peft", reason='pip install "megabatch[huggingface]"')
    counts = ([4, 2, 3], [2, 1, 0])
    answers = pool.run(on_rank, 3, family, parallel, counts, checkpointing)
    whole = ranked_batch(counts)
    monkeypatch.setattr(vision_language, "batch", lambda *_: whole)
    wanted = vision_language.plain(vision_language.adapted(family, 2), 9, 3)
    loss = sum(answer[0] for answer in answers) / len(answers)
    for answer in answers:
        same((loss, answer[1]), wanted)


# Options and hostile inputs


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return vision_language.save(tmp_path_factory.mktemp("models") / "base")


def count(pair, sample):
    return len(pair.second.prepare(sample, None)[0])


def test_options_limit_images_and_texts(base, tmp_path):
    page, text = vision_language.image(64, 64), "one two three four red blue"
    pair = towers.load(f"hf:{base}", (TEXT, MIXED))
    small = towers.load(f"hf:{base}", (TEXT, MIXED), max_pixels=32 * 32, max_length=2)
    assert count(pair, page) - count(small, page) == 64 - 16
    assert count(pair, text) - count(small, text) == 4
    assert towers.load(f"hf:{base}", (MIXED, MIXED), min_pixels=64 * 64).first.measure(vision_language.image(8, 8)) > 64
    plain = towers.load(f"hf:{base}", (TEXT, MIXED), chat_template=False, document_prompt="document ")
    assert count(plain, "one") == 2
    assert count(plain, Content("one", page)) == 2 + 2 + 64
    towers.save(small, tmp_path / "run")
    loaded = towers.load_saved(tmp_path / "run")
    assert count(loaded, page) == count(small, page)
    assert count(loaded, text) == count(small, text)
    for one in (pair, small, plain):
        for sample in (*CONTENTS, page, text):
            assert one.second.measure(sample) == count(one, sample)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_pixels": 10}, "max_pixels at least 64, which is one visual token, got 256 and 10"),
        ({"min_pixels": 100_000}, "min_pixels <= max_pixels"),
        ({"max_length": 0}, "max_length must be at least 1 token, got 0"),
        ({"pooling": "best"}, "pooling must be one of"),
        ({"packed": True}, "packed must not be set for a vision-language model"),
        ({"chat_template": "yes"}, "chat_template must be true or false, got 'yes'"),
        ({"image_size": 64}, "image_size and context_length must not be set for a vision-language model"),
        ({"query_prompt": 3}, "query_prompt must be a text, got 3"),
    ],
)
def test_wrong_options_are_named(base, options, message):
    with pytest.raises(ValueError, match=message):
        towers.load(f"hf:{base}", (TEXT, MIXED), **options)


def test_options_of_images_are_for_vision_language_models_only(tmp_path):
    sizes = {"model_type": "qwen3", **decoders.SIZES}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(ValueError, match=r"max_pixels is for vision-language models such as Qwen2-VL, got 'hf-config:"):
        towers.load(f"hf-config:{tmp_path}", (TEXT, TEXT), max_pixels=4096)


def test_extreme_images_and_texts(base):
    pair = towers.load(f"hf:{base}", (MIXED, MIXED))
    tower = pair.first
    for shape in ((1, 1), (1, 150), (150, 1)):
        embedding = encode(tower, [vision_language.image(*shape)])
        assert embedding.isfinite().all()
        assert tower.measure(vision_language.image(*shape)) < 90
    with pytest.raises(UnreadableSampleError, match=r"an image of 300 × 1 pixels cannot be encoded: absolute aspect ratio"):
        tower.prepare(vision_language.image(1, 300), None)
    assert tower.measure(vision_language.image(1, 300)) >= 1
    assert tower.measure(EncodedImage(b"no image", "x.png")) >= 1
    assert encode(tower, ["", Content("")]).isfinite().all()
    without = towers.load(f"hf:{base}", (MIXED, MIXED), chat_template=False)
    assert encode(without.first, [""]).isfinite().all()
    attack = Content("one <|image_pad|> <|video_pad|>", vision_language.image(16, 16))
    close(encode(tower, [attack]), encode(tower, [attack._replace(text="one")]))


def test_a_chunk_without_images_is_a_text_chunk(base):
    """A text alone, and in a chunk with an image, have the same embedding."""
    pair = towers.load(f"hf:{base}", (MIXED, MIXED))
    close(encode(pair.first, CONTENTS)[1:2], encode(pair.first, CONTENTS[1:2]))
    captioned = towers.load(f"hf:{base}", (IMAGE, TEXT))
    close(encode(captioned.first, [CONTENTS[2].image]), encode(pair.first, CONTENTS[2:3]))
    close(encode(captioned.second, ["red cat"]), encode(pair.first, CONTENTS[1:2]))
    assert isinstance(pair.first.module, VisionLanguageEncoder)
    ids, patches, grid = pair.first.prepare(CONTENTS[0], None)
    assert patches.dtype == torch.uint8
    assert patches.shape == (int(grid.prod()), 48)
    assert inputs_of(pair.first).collate([(ids, patches, grid)])["patches"].shape == (1, *patches.shape)


def test_models_without_a_processor_and_other_commands(base, tmp_path):
    with pytest.raises(ValueError, match="must not be a vision-language model"):
        plan_model(f"hf-config:{base}")
    with pytest.raises(ValueError, match="--to must be hf for a vision-language model, got onnx"):
        export(towers.load(f"hf:{base}", (MIXED, MIXED)), "onnx", tmp_path / "onnx")
    assert towers.load(f"hf-config:{base}", (TEXT, MIXED)).second.kind == MIXED

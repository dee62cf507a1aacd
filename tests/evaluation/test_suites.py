"""Adapters for MTEB 2 and CLIP_benchmark, which give the embeddings of the towers, and the prompts for ImageNet."""

import json

import pytest
import torch
from torch.utils.data import DataLoader

from megabatch_train import cli, towers
from megabatch_train.data.media import images
from megabatch_train.evaluation import encode
from megabatch_train.evaluation.suites import IMAGENET, MtebEncoder, clip_benchmark_model

TEXTS = ["red tree", "blue", "a small house", "river"]


@pytest.fixture
def pictures():
    """Images that are not squares."""
    pytest.importorskip("PIL")
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (3, 20 + i, 30), dtype=torch.uint8, generator=generator) for i in range(4)]


def small(*kinds):
    torch.manual_seed(0)
    return towers.load("small", kinds, width=16, buckets=512)


def test_prompts_are_those_of_clip():
    open_clip = pytest.importorskip("open_clip")
    assert len(IMAGENET) == 80
    assert {prompt.format("cat") for prompt in IMAGENET} == {prompt("cat") for prompt in open_clip.OPENAI_IMAGENET_TEMPLATES}


def test_queries_and_documents_have_their_towers():
    pair = small("text", "text")
    with torch.no_grad():
        for parameter in pair.first.module.parameters():
            parameter.mul_(1.5).add_(0.1)
    encoder = MtebEncoder(pair)
    batches = [{"text": TEXTS[:3]}, {"text": TEXTS[3:]}]
    query = encoder.encode(batches, prompt_type="query", task_metadata=None, hf_split="test", hf_subset="default", batch_size=3)
    document = encoder.encode(batches, prompt_type="document", task_metadata=None, hf_split="test", hf_subset="default")
    torch.testing.assert_close(query, encode(pair.first, TEXTS))
    torch.testing.assert_close(document, encode(pair.second, TEXTS))
    both = encoder.similarity(query, document)
    torch.testing.assert_close(both, torch.cosine_similarity(query[:, None], document[None], dim=-1))
    torch.testing.assert_close(encoder.similarity_pairwise(query.numpy(), document.numpy()), both.diagonal())
    torch.testing.assert_close(encoder.similarity(query[0], document), both[:1])


def test_images_and_texts_of_mteb(pictures):
    pair = small("image", "text")
    encoder = MtebEncoder(pair)
    pillow = [images.to_pillow(picture) for picture in pictures]
    torch.testing.assert_close(encoder.encode([{"image": pillow}]), encode(pair.first, pictures))
    torch.testing.assert_close(encoder.encode([{"text": TEXTS}], prompt_type="query"), encode(pair.second, TEXTS))
    with pytest.raises(ValueError, match="must have texts or images, and not both, got the keys text, image"):
        encoder.encode([{"text": TEXTS, "image": pillow}])
    with pytest.raises(ValueError, match="must have texts for this model, got images"):
        MtebEncoder(small("text", "text")).encode([{"image": pillow}])


def test_mteb_accepts_the_encoder():
    mteb = pytest.importorskip("mteb")
    from mteb.models.models_protocols import EncoderProtocol

    encoder = MtebEncoder(small("text", "text"), "me/model")
    assert isinstance(encoder, EncoderProtocol)
    assert encoder.mteb_model_meta.name == "me/model"
    assert mteb.__version__ >= "2"


def zero_shot_classifier(model, tokenizer, classnames, templates, device):
    """As in CLIP_benchmark's zeroshot_classification.py."""
    weights = []
    for name in classnames:
        texts = tokenizer([template.format(c=name) for template in templates]).to(device)
        embedding = torch.nn.functional.normalize(model.encode_text(texts), dim=-1).mean(dim=0)
        weights.append(embedding / embedding.norm())
    return torch.stack(weights, dim=1)


def test_a_model_of_clip_benchmark(pictures):
    pair = small("image", "text")
    model, transform, tokenizer = clip_benchmark_model(pair)
    weights = zero_shot_classifier(model.to("cpu").eval(), tokenizer, TEXTS, ["a {c}.", "the {c}."], "cpu")
    wanted = [torch.nn.functional.normalize(encode(pair.second, [f"a {name}.", f"the {name}."]), dim=-1) for name in TEXTS]
    wanted = torch.nn.functional.normalize(torch.stack(wanted).mean(1), dim=-1)
    torch.testing.assert_close(weights.T, wanted)
    loader = DataLoader([transform(images.to_pillow(picture)) for picture in pictures], batch_size=3)
    torch.testing.assert_close(torch.cat([model.encode_image(batch) for batch in loader]), encode(pair.first, pictures))
    assert len(tokenizer("one text")) == 1
    with pytest.raises(ValueError, match="pair must encode images and texts, got texts and texts"):
        clip_benchmark_model(small("text", "text"))


def test_the_command_has_the_prompts_by_name(tmp_path, pictures):
    for number, picture in enumerate(pictures):
        folder = tmp_path / "data" / f"class {number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        images.to_pillow(picture).save(folder / f"{number}.png")
    (tmp_path / "prompts").write_text("\n".join(IMAGENET))
    command = ["eval", "small", "--zero-shot", "--data", str(tmp_path / "data"), "--device", "cpu"]
    for templates in ("imagenet", str(tmp_path / "prompts")):
        assert cli.main([*command, "--templates", templates, "--output", str(tmp_path / "out")]) == 0
    first, second = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert first == second

"""Texts cut after their last token give the embeddings and gradients of the padded texts."""

import math

import pytest
import torch
from torch import nn

import megabatch as mb
from megabatch.integrations.open_clip import CausalTexts
from megabatch_train import towers
from megabatch_train.towers.open_clip import Sides
from steps import Loss, assert_same, cached, gradients

CONTEXT, VOCABULARY = 40, 60


def clip(kind="CLIP", seed=0, **text):
    open_clip = pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
    torch.manual_seed(seed)
    vision = open_clip.CLIPVisionCfg(layers=1, width=16, head_width=8, patch_size=8, image_size=16)
    sizes = {"context_length": CONTEXT, "vocab_size": VOCABULARY, "width": 16, "heads": 2, "layers": 3}
    return getattr(open_clip, kind)(8, vision, open_clip.CLIPTextCfg(**{**sizes, **text}))


def tokens(lengths, end=VOCABULARY - 1, seed=0):
    """Beginning, words, the end token, and padding with zeros."""
    found = torch.randint(1, VOCABULARY - 2, (len(lengths), CONTEXT), generator=torch.Generator().manual_seed(seed))
    lengths = torch.as_tensor(lengths)
    found[torch.arange(len(lengths)), lengths - 1] = end
    return torch.where(torch.arange(CONTEXT) < lengths[:, None], found, 0)


@pytest.mark.quick({"dtype": torch.float64})
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("CLIP", {}),
        ("CLIP", {"pool_type": "eos", "eos_id": 7}),
        ("CLIP", {"proj_bias": True}),
        ("CLIP", {"proj_type": "none"}),
        ("CustomTextCLIP", {}),
        ("CustomTextCLIP", {"pool_type": "eos", "eos_id": 7, "ls_init_value": 0.1}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_open_clip_texts_cut_after_the_end_token(kind, text, dtype):
    model = clip(kind, **text).to(dtype)
    module, causal = Sides(model), CausalTexts.of(model)
    lengths = [2, 15, 9, 3, 16, 5]
    ids = tokens(lengths, end=text.get("eos_id", VOCABULARY - 1))
    if text.get("eos_id") is not None:
        ids[(ids == 7) & (torch.arange(CONTEXT) < torch.tensor(lengths)[:, None] - 1)] = 8  # one end token each
    assert causal.lengths({"text": ids}).tolist() == lengths
    torch.testing.assert_close(module(text=ids), nn.functional.normalize(model.encode_text(ids), dim=1), rtol=0, atol=0)
    whole, cut = (embeddings_and_gradients(module, ids[:, :width]) for width in (CONTEXT, 16))
    if dtype == torch.float64:
        assert_same(cut, whole, 1e-11)
    else:
        truth = embeddings_and_gradients(module.double(), ids)
        assert distance(cut, truth) <= 2 * distance(whole, truth)


def embeddings_and_gradients(module, ids):
    embeddings = module(text=ids)
    weights = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(1)).to(embeddings.dtype)
    (embeddings * weights).sum().backward()
    return [embeddings.detach(), *gradients(module)]


def distance(found, truth):
    """Of all numbers together."""
    return math.hypot(*((a.double() - b).norm().item() for a, b in zip(found, truth, strict=True) if b is not None))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("CustomTextCLIP", {"pool_type": "last", "no_causal_mask": True}),  # SigLIP
        ("CustomTextCLIP", {"no_causal_mask": True}),  # MobileCLIP
        ("CLIP", {"pool_type": "last", "no_causal_mask": True}),  # CLIPA
        ("CLIP", {"pool_type": "last"}),
        ("CLIP", {"pool_type": "first"}),
        ("CustomTextCLIP", {"embed_cls": True}),
        ("CustomTextCLIP", {"output_tokens": True}),  # CoCa
    ],
)
def test_other_open_clip_texts_are_not_cut(kind, text):
    assert CausalTexts.of(clip(kind, **text)) is None


def test_a_step_of_an_open_clip_model_encodes_fewer_tokens():
    model = clip().double()
    module, loss = Sides(model), Loss()
    lengths = torch.randint(2, CONTEXT + 1, (20,), generator=torch.Generator().manual_seed(2))
    lengths[3:] = lengths[3:] // 3 + 2
    ids = tokens(lengths)
    images = torch.randn(20, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    value = loss(module(image=images), module(text=ids))
    value.backward()
    wanted = [value.detach(), *gradients(model, loss)]
    seen = []
    hook = model.transformer.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[0] * inputs[0].shape[1]))
    source = mb.HostSource({"text": ids}, lengths=CausalTexts.of(model).lengths({"text": ids}))
    assert_same(cached(loss, [(module, {"image": images}), (module, source)], (model, loss), chunk_size=4), wanted)
    hook.remove()
    assert sum(seen) < 0.7 * 2 * ids.numel()


def test_captions_of_open_clip_models_without_words_and_with_ten_thousand():
    pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
    tower = towers.load("open_clip:ViT-S-32-alt").second
    inputs = tower.collate([tower.prepare(text, None) for text in ("", "a dog", "dog " * 10000)])
    assert inputs["text"].shape == (3, 77)
    assert tower.lengths(inputs).tolist() == [2, 4, 77]
    with torch.no_grad():
        together = tower.module(**inputs)
        short = tower.module(text=inputs["text"][:2, :8])
    torch.testing.assert_close(short, together[:2], rtol=1e-4, atol=1e-5)


def test_texts_of_transformers_encoders(tmp_path):
    transformers = pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 99}
    config = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config.save_pretrained(tmp_path)
    tower = towers.load(f"hf-config:{tmp_path}", ("text", "text")).second
    tower.module.double()
    counts = (3, 7, 1, 40, 12, 2)
    captions = ["", "a", *(" ".join(f"word{i * n % 17}" for i in range(n)) for n in counts), "word " * 10000]
    inputs = tower.collate([tower.prepare(caption, None) for caption in captions])
    lengths, loss = tower.lengths(inputs), Loss()
    assert lengths.shape == (len(captions),)
    assert lengths.argsort()[-1] == len(captions) - 1
    parameters = (tower.module, loss)
    halves = lambda x: loss(x[:4], x[4:8])  # noqa: E731
    wanted = cached(halves, [(tower.module, mb.HostSource(inputs, lengths=None))], parameters, chunk_size=3)
    found = cached(halves, [(tower.module, mb.HostSource(inputs, lengths=lengths))], parameters, chunk_size=3)
    assert_same(found, wanted)

"""Tiny vision-language models with tokenizers and image processors that are made offline; importable by other processes."""

import torch

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
WORDS = ("one", "two", "three", "four", "red", "blue", "cat", "dog", "user", "system", "assistant", "query", "document", ":")
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }} {% for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{%- endif -%}"""
TEXT = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "max_position_embeddings": 256}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 10000.0}


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate((*SPECIAL, "<|unknown|>", *WORDS))}
    made = Tokenizer(models.WordLevel(words, unk_token="<|unknown|>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<|unknown|>",
        pad_token=SPECIAL[0],
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL[1:]),
    )


def processor(family="qwen2_vl", template=TEMPLATE, most=64 * 64):
    import transformers

    size = {"shortest_edge": 16 * 16, "longest_edge": most}
    options = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": size}
    images = transformers.Qwen2VLImageProcessor(**options)
    names = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
    videos = {"qwen3_vl": "Qwen3VLVideoProcessor"}.get(family, "Qwen2VLVideoProcessor")
    kind = getattr(transformers, f"{names[family]}Processor")
    return kind(images, tokenizer(), getattr(transformers, videos)(**options), chat_template=template)


def config(family):
    from transformers import AutoConfig

    ids = {
        name: SPECIAL.index(f"<|{token}|>")
        for name, token in (
            *(("image_token_id", "image_pad"), ("video_token_id", "video_pad")),
            *(("vision_start_token_id", "vision_start"), ("vision_end_token_id", "vision_end")),
        )
    }
    vision = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    text = {**TEXT, "vocab_size": len(SPECIAL) + 1 + len(WORDS), "rope_parameters": ROPE, "rope_scaling": ROPE}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 16, "hidden_size": 24, "mlp_ratio": 2}
    elif family == "qwen2_5_vl":
        vision |= {"hidden_size": 16, "out_hidden_size": 24, "intermediate_size": 20, "window_size": 16}
        vision |= {"fullatt_block_indexes": [1]}
    else:
        vision |= {"hidden_size": 16, "out_hidden_size": 24, "intermediate_size": 20, "num_position_embeddings": 16}
        vision |= {"deepstack_visual_indexes": [0]}
        text |= {"head_dim": 6}
    return AutoConfig.for_model(family, text_config=text, vision_config=vision, **ids)


def model(family, seed=0, scale=0.25):
    """A model with random weights that are large enough for its embeddings to differ."""
    from transformers import AutoModel

    torch.manual_seed(seed)
    made = AutoModel.from_config(config(family))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=scale)
    return made.eval()


def save(folder, family="qwen2_vl", **options):
    """Writes a checkpoint and returns its folder."""
    made = model(family)
    made.save_pretrained(folder)
    processor(family, **options).save_pretrained(folder)
    return folder


def image(height, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 3, 3, generator=generator) * 255
    return torch.nn.functional.interpolate(coarse, (height, width), mode="nearest")[0].to(torch.uint8)


# A step with hard negatives in float64


def samples(seed, count):
    """Texts, images of different sizes, and both; every third sample has no image."""
    from megabatch_train.data.dataset import Content

    sizes = [(16, 16), (40, 24), (20, 56), (64, 64), (9, 30)]
    made = []
    for i in range(count):
        text = " ".join(WORDS[(seed + i * j) % 8] for j in range(i % 4))
        picture = image(*sizes[(seed + i) % 5], seed + i) if i % 3 else None
        made.append(Content(text or ("" if picture is not None else "one"), picture))
    return made


def batch(queries, negatives):
    """Queries; their documents, followed by hard negatives."""
    return samples(1, queries), [*samples(50, queries), *samples(80, negatives)]


def adapted(family="qwen2_vl", lora=2, dropout=0.0):
    """A pair in float64 with adapters that change its embeddings."""
    from megabatch_train.towers.layers.lora import inject
    from megabatch_train.towers.tokens import AS_STORED
    from megabatch_train.towers.tower import LoraConfig
    from megabatch_train.towers.vision_language import build_pair

    made = model(family)
    if lora:
        inject(made, LoraConfig(lora, dropout=dropout))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    pair = build_pair(made, processor(family), "hf:tiny", None, AS_STORED, ())
    pair.first.module.double()
    compute_in_float64(made)
    return pair


def compute_in_float64(made):
    """Replaces the parts that compute in float32, whatever the type of their inputs is."""
    import importlib
    from functools import partial

    library = importlib.import_module(type(made).__module__)
    for part in made.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.forward = partial(_norm, part)

    def rotate(q, k, cos, sin):
        cos, sin = cos.unsqueeze(-2).to(q.dtype), sin.unsqueeze(-2).to(q.dtype)
        return q * cos + library.rotate_half(q) * sin, k * cos + library.rotate_half(k) * sin

    library.apply_rotary_pos_emb_vision = rotate


def _norm(part, states):
    return torch.nn.functional.rms_norm(states, states.shape[-1:], part.weight.to(states.dtype), part.variance_epsilon)


def replay(tower, contents):
    """The samples by replay, which sorts them by their number of tokens."""
    import megabatch as mb

    return mb.ReplaySource(
        contents,
        lambda content, generator: tower.prepare(content, generator),
        collate=tower.collate,
        length=tower.measure,
    )


def plain(pair, queries, negatives):
    """One graph over the whole batch and a dense loss."""
    from decoders import dense, gradients

    encoder = pair.first.module
    sides = ([pair.first.prepare(content, None) for content in side] for side in batch(queries, negatives))
    loss = dense(*(encoder(**pair.first.collate(side)) for side in sides))
    loss.backward()
    return loss.detach(), gradients(encoder)

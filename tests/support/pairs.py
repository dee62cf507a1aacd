"""Tiny models of transformers that encode images and texts, with their tokenizers and image processors."""

import torch

WORDS = ("cat", "dog", "sun", "red", "sea", "sky", "run", "fly")
LENGTH = 12
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8}
TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"vocab_size": 12, "max_position_embeddings": LENGTH, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
FAMILIES = ("CLIP", "Siglip", "Siglip2", "ChineseCLIP", "AltCLIP", "Align")
FULL_LENGTH = ("Siglip", "Siglip2")  # families that pool the last token, which is padding


def write_pair(folder, family, seed=0):
    """Writes a model with random weights, and returns it in evaluation mode."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    options = {"tokenizer_object": tokenizer, "model_max_length": LENGTH, **special}
    transformers.PreTrainedTokenizerFast(**options).save_pretrained(folder)
    processor(family).save_pretrained(folder)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}Model")(config(family)).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name in ("logit_scale", "logit_bias"):
                value.fill_(1.5 if name == "logit_scale" else -2.5)
            elif value.dim() > 1:
                value.normal_(std=0.3)
    model.save_pretrained(folder)
    return model


def config(family):
    import transformers

    kind, text, vision = getattr(transformers, f"{family}Config"), dict(TEXT), {**VISION, "image_size": 16}
    if family == "Align":
        vision = {"image_size": 16, "num_channels": 3, "hidden_dim": 16, "width_coefficient": 0.2, "depth_coefficient": 0.2}
        vision |= {"in_channels": [8, 8], "out_channels": [8, 8], "kernel_sizes": [3, 3], "strides": [1, 2]}
        vision |= {"num_block_repeats": [1, 1], "expand_ratios": [1, 1], "depthwise_padding": [], "depth_divisor": 8}
    elif family == "Siglip2":
        vision = {**VISION, "num_patches": 4}
    if family.startswith("Siglip"):
        text["projection_size"] = 16
    elif family == "AltCLIP":
        text |= {"project_dim": 8, "max_position_embeddings": LENGTH + 1}
    return kind(text_config=text, vision_config=vision, **({} if family.startswith("Siglip") else {"projection_dim": 8}))


def processor(family):
    import transformers

    if family == "Siglip2":
        return transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=4)
    size = {"height": 16, "width": 16}
    if family == "Siglip":
        return transformers.SiglipImageProcessor(size=size)
    if family == "Align":
        return transformers.EfficientNetImageProcessor(size=size)
    return transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size)


def images(count=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (3, 20 + 9 * i, 31), dtype=torch.uint8, generator=generator) for i in range(count)]


TEXTS = ["a cat", "sun", "red sea sky cat dog sun red sea sky fly run cat dog"]


@torch.no_grad()
def features(model, folder):
    """The embeddings of `images()` and `TEXTS` as the documentation of transformers computes them."""
    import transformers

    from megabatch_train.data.media.images import to_pillow

    read = transformers.AutoImageProcessor.from_pretrained(folder)
    pixels = read(images=[to_pillow(image) for image in images()], return_tensors="pt")
    full = type(model).__name__.removesuffix("Model") in FULL_LENGTH
    padding = "max_length" if full else True
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(TEXTS, padding=padding, truncation=True, return_tensors="pt")
    texts = {"input_ids": tokens["input_ids"]} | ({} if full else {"attention_mask": tokens["attention_mask"]})
    found = model.get_image_features(**pixels), model.get_text_features(**texts)
    return [torch.nn.functional.normalize(getattr(one, "pooler_output", one), dim=-1) for one in found]

"""Generated recordings, and a tiny CLAP model of transformers with its tokenizer and feature extractor."""

import io
import json
import math
import wave

import torch

RATE = 8000
TONES = {"low": 300.0, "middle": 800.0, "high": 1500.0, "highest": 2600.0}


def tone(frequency, seconds=0.5, rate=RATE, channels=1):  # (n, channels) from −1 to 1
    times = torch.arange(round(seconds * rate), dtype=torch.float64) / rate
    return (0.5 * torch.sin(2 * math.pi * frequency * times))[:, None].expand(-1, channels)


def wav(samples, rate=RATE, size=2):
    """The bytes of a WAV file with integer samples of `size` bytes."""
    scaled = (samples.double() * (2 ** (8 * size - 1) - 1)).round().long() + (128 if size == 1 else 0)
    data = b"".join(int(value).to_bytes(size, "little", signed=size > 1) for value in scaled.flatten().tolist())
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((samples.shape[1], size, rate, 0, "NONE", ""))
        out.writeframes(data)
    return file.getvalue()


def write_tones(folder, count=24):
    """A table of tones of different lengths, with the names of their pitches."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, lines = torch.Generator().manual_seed(0), []
    for number in range(count):
        name = list(TONES)[number % len(TONES)]
        shift, seconds = torch.rand(2, generator=generator).tolist()
        (folder / f"{number}.wav").write_bytes(wav(tone(TONES[name] * (1 + 0.02 * shift), 0.3 + seconds)))
        lines.append(json.dumps({"audio": f"{number}.wav", "caption": f"a {name} tone"}))
    table = folder / "tones.jsonl"
    table.write_text("\n".join(lines) + "\n")
    return table


def write_clap(folder, seed=0, fusion=False):
    """Writes a CLAP model with random weights, and returns it in evaluation mode."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<s>", "<pad>", "</s>", "<unk>", "a", "tone", *TONES]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=14, **special).save_pretrained(folder)
    transformers.ClapFeatureExtractor(
        feature_size=16,
        sampling_rate=RATE,
        hop_length=250,
        max_length_s=1,
        fft_window_size=256,
        frequency_max=4000,
        truncation="fusion" if fusion else "rand_trunc",
    ).save_pretrained(folder)
    text = {"vocab_size": len(words), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"intermediate_size": 32, "max_position_embeddings": 16, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    text |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    audio = {"spec_size": 32, "num_mel_bins": 16, "patch_size": 4, "patch_stride": [4, 4], "window_size": 2, "hidden_size": 32}
    audio |= {"patch_embeds_hidden_size": 8, "depths": [1, 1, 1], "num_attention_heads": [2, 2, 2], "enable_fusion": fusion}
    audio |= {"drop_path_rate": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.ClapConfig(
        text_config={**text, "projection_dim": 8}, audio_config={**audio, "projection_dim": 8}, projection_dim=8
    )
    torch.manual_seed(seed)
    model = transformers.ClapModel(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.startswith("logit_scale"):
                value.fill_(1.5)
            elif value.dim() > 1:
                value.normal_(std=0.2)
    model.save_pretrained(folder)
    return model

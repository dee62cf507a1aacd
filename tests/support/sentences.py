"""A tiny model of sentence-transformers, texts for it, and its own trainer: as a function, and as a script for torchrun."""

import json
import random
import sys
from pathlib import Path

import torch

WORDS = [f"{first}{second}" for first in "bcdfg" for second in ("at", "og", "ip", "un")]
LENGTH = 12


def write_model(folder, seed=0, dropout=0.0):
    """A transformer of two layers, whose weights come from the seed. Among several ranks only the first would write."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    BertModel(config).save_pretrained(folder)


def tiny_model(folder, **options):
    """The one in the folder, in float64; written first if there is none."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    if not (folder / "config.json").exists():
        write_model(folder, **options)
    transformer = Transformer(str(folder), max_seq_length=LENGTH)
    pooling = Pooling(transformer.get_embedding_dimension())
    return SentenceTransformer(modules=[transformer, pooling], device="cpu").double()


def texts(count, seed):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(2, LENGTH - 4))) for _ in range(count)]


def columns(rows, hard=0):
    anchors = texts(rows, 1)
    near = [f"{anchor} {word}" for anchor, word in zip(anchors, texts(rows, 2), strict=True)]
    near = [" ".join(text.split()[:LENGTH]) for text in near]
    found = {"anchor": anchors, "positive": near}
    return {**found, **{f"negative_{i}": texts(rows, 3 + i) for i in range(hard)}}


def trained(folder, loss_of, data, **arguments):
    """The weights after training with the loss of that model, and the loss."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_model(folder / "model", dropout=arguments.pop("dropout", 0.0))
    loss = loss_of(model)
    settings = {
        "output_dir": str(folder / "run"),
        "per_device_train_batch_size": 24,
        "max_steps": 20,
        "learning_rate": 1e-3,
        "seed": 3,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **arguments,
    }
    trainer = SentenceTransformerTrainer(
        model=model, args=SentenceTransformerTrainingArguments(**settings), train_dataset=Dataset.from_dict(data), loss=loss
    )
    trainer.train()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, loss


def losses(library):
    """The classes of a library, by a short name; "theirs" is sentence-transformers itself."""
    if library == "theirs":
        from sentence_transformers.sentence_transformer import losses as found
    else:
        from megabatch.integrations import sentence_transformers as found
    return {
        "ranking": found.CachedMultipleNegativesRankingLoss,
        "symmetric": found.CachedMultipleNegativesSymmetricRankingLoss,
        "gist": found.CachedGISTEmbedLoss,
    }


def loss_of(library, name, folder, options):
    """What makes such a loss of a model; GIST's guide has other weights."""
    kind = losses(library)[name]
    if name == "gist":
        guide = tiny_model(folder / "guide", seed=7)
        return lambda model: kind(model, guide, **options)
    return lambda model: kind(model, **options)


def run(folder, library, name, options, data, arguments):
    return trained(folder, loss_of(library, name, folder, options), data, **arguments)


def main():
    """Each case with each library, on this rank of several; rank 0 writes the weights."""
    import torch.distributed as dist

    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    found = []
    for library, name, options, hard, arguments in cases:
        weights, loss = run(folder, library, name, options, columns(96, hard), arguments)
        scale = getattr(loss, "learned_scale", None)
        found.append((weights, None if scale is None else scale.bias.detach()))
    if dist.get_rank() == 0:
        torch.save(found, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

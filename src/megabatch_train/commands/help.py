"""`megabatch help`: what --data and MODEL can be."""

import argparse

from megabatch_train.commands import describe

DATA = """
--data names the pairs. It takes:

  pairs.csv                   a table with one pair per row (.csv, .tsv, .jsonl, .parquet), a folder
                              with a table, or a pattern such as "data/train-*.parquet"
  photos/                     images with a caption beside each (dog.jpg, and dog.txt or dog.json)
  flowers/                    a folder of images for each class; the folder's name is the caption
  "data/{00000..00099}.tar"   webdataset shards, a pattern such as "data/*.tar", or their folder
  s3://bucket/pairs.csv       tables and shards by URL: s3://, gs://, hf://, https://
  datasets:PATH@SPLIT         a Hugging Face dataset (without @SPLIT: train), or the folder that
                              Dataset.save_to_disk wrote
  "3 * a.csv + 1 * b/*.tar"   a mixture: three pairs of the first source for one pair of the second
  emoji                       a demo: drawings by two artists and their names
  wordnet                     a demo: words and their definitions

`megabatch embed` and `megabatch search` also take a folder of images without captions.

--columns names the columns of a table by their role. Roles that are not named are found by common
names, such as image and caption, or query and document.

  image=NAME text=NAME        pairs of an image and a text
  query=NAME document=NAME    pairs of two texts
  negative=NAME               hard negatives, for training; once for each column
  label=NAME                  a class, for training with --loss sup_con
  score=NAME                  the similarity of two texts, for evaluation
  negative=                   a role without a name reads no column (negative, label, score)

  megabatch train --data pairs.csv --columns image=file text=description
  megabatch train --data triples.csv --loss info_nce --columns query=q document=a negative=worse

More: https://github.com/megabatch/megabatch/blob/main/docs/data.md
"""
MODELS = """
MODEL and --model name two encoders (towers), for images and texts or for two texts:

  small                           a convolutional network and a bag of n-grams, for a CPU
  open_clip:ViT-B-32              a model of open_clip with random weights, for images and texts
  open_clip:ViT-B-32@WEIGHTS      a model of open_clip with trained weights
  open_clip:FILE.json             a model of open_clip from its config file
  hf:NAME                         one transformers encoder with its weights, for texts and texts
  hf:IMAGES+TEXTS                 two transformers encoders, for images and texts
  hf-config:FOLDER                the same with random weights, from config.json in the folder
  hf-config:IMAGES+TEXTS          two folders, for images and texts

Commands that use a trained model also take:

  runs/emoji-1                    the folder of a run: its last weights
  runs/emoji-1/best               the weights with the best evaluation
  runs/emoji-1/checkpoints/step_00000100   a checkpoint

  megabatch train --data pairs.csv --model open_clip:ViT-B-32
  megabatch eval open_clip:ViT-B-32@laion2b_s34b_b79k --data pairs.csv

More: https://github.com/megabatch/megabatch/blob/main/docs/training.md
"""
TOPICS = {"data": DATA, "models": MODELS}
DESCRIPTION = """
Prints the values that --data, --columns, MODEL and --model can have.

  megabatch help data
  megabatch help models
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch help`."""
    describe(parser, DESCRIPTION)
    parser.add_argument("topic", nargs="?", choices=TOPICS, metavar="TOPIC", help="data or models (default: both)")


def run(args: argparse.Namespace) -> int:
    """Prints the topic."""
    shown = [TOPICS[args.topic]] if args.topic else list(TOPICS.values())
    print("\n".join(text.strip("\n") + "\n" for text in shown), end="")
    return 0

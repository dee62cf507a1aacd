"""`megabatch help`: describes the values of --data and MODEL."""

import argparse

from megabatch_train.commands import describe

DATA = """
--data names the pairs. Possible values are:

  pairs.csv                   a table with one pair per row (.csv, .tsv, .jsonl, .parquet), a folder
                              with a table, or a pattern such as "data/train-*.parquet"
  photos/                     a folder with a caption file for each image (dog.jpg and dog.txt, or
                              dog.jpg and dog.json)
  flowers/                    one subfolder per class; the name of the subfolder is the caption
  "data/{00000..00099}.tar"   webdataset shards, a pattern such as "data/*.tar", or their folder
  s3://bucket/pairs.csv       tables and shards by URL: s3://, gs://, hf://, https://
  datasets:PATH@SPLIT         a Hugging Face dataset (default split: train), or a folder that
                              Dataset.save_to_disk wrote
  "3 * a.csv + 1 * b/*.tar"   a mixture: three pairs of the first source for one pair of the second
  emoji                       demo data: drawings by two artists and their names
  wordnet                     demo data: words and their definitions

`megabatch embed` and `megabatch search` also accept a folder of images without captions.

--columns assigns columns of a table to roles. By default, megabatch recognizes common names of
columns, such as image and caption, or query and document.

  image=NAME text=NAME        pairs of an image and a text
  query=NAME document=NAME    pairs of two texts
  negative=NAME               hard negatives for training; repeat it for each column
  label=NAME                  class of a pair, for training with --loss sup_con
  score=NAME                  similarity of two texts, for evaluation
  negative=                   do not read a column of this role (negative, label, score)

  megabatch train --data pairs.csv --columns image=file text=description
  megabatch train --data triples.csv --loss info_nce --columns query=q document=a negative=worse

More: https://github.com/megabatch/megabatch/blob/main/docs/data.md
"""
MODELS = """
MODEL and --model name a pair of encoders (towers), for images and texts or for texts and texts:

  small                           a convolutional network and a bag of n-grams, for a CPU
  open_clip:ViT-B-32              a model of open_clip with random weights, for images and texts
  open_clip:ViT-B-32@WEIGHTS      a model of open_clip with trained weights
  open_clip:FILE.json             a model of open_clip from its config file
  hf:NAME                         one transformers encoder with its weights, for both texts
  hf:IMAGES+TEXTS                 two transformers encoders, for images and texts
  hf-config:FOLDER                like hf:NAME, but with random weights, from FOLDER/config.json
  hf-config:IMAGES+TEXTS          like hf:IMAGES+TEXTS, but with random weights, from two folders

Commands that use a trained model also accept:

  runs/emoji-1                    the last weights of a run
  runs/emoji-1/best               the weights with the best evaluation
  runs/emoji-1/checkpoints/step_00000100   a checkpoint

  megabatch train --data pairs.csv --model open_clip:ViT-B-32
  megabatch eval open_clip:ViT-B-32@laion2b_s34b_b79k --data pairs.csv

More: https://github.com/megabatch/megabatch/blob/main/docs/training.md
"""
TOPICS = {"data": DATA, "models": MODELS}
DESCRIPTION = """
Describes the values of --data, --columns, MODEL and --model.

  megabatch help data
  megabatch help models
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch help`."""
    describe(parser, DESCRIPTION)
    parser.add_argument("topic", nargs="?", choices=TOPICS, metavar="TOPIC", help="data or models (default: print both)")


def run(args: argparse.Namespace) -> int:
    """Prints the topic."""
    texts = [TOPICS[args.topic]] if args.topic else list(TOPICS.values())
    print("\n".join(text.strip("\n") + "\n" for text in texts), end="")
    return 0

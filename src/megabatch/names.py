"""Names of data and models as users write them, for help and error messages. Imports nothing, so that help appears at once."""

TABLES = (".csv", ".tsv", ".jsonl", ".parquet")  # endings
DATA = (
    "emoji (drawings by two artists and their names)",
    "wordnet (words and definitions)",
    f"a table of pairs, or a folder with one ({', '.join(TABLES)})",
    "a folder of images for each class, whose name is the caption",
    'webdataset shards, as in "data/{00000..00099}.tar" or "data/*.tar", or a folder of them',
)
MODELS = (
    "small (a convolutional network and a bag of n-grams, for a CPU)",
    "open_clip:MODEL or open_clip:MODEL@WEIGHTS (image–text, such as open_clip:ViT-B-32)",
    "hf:NAME (text–text, a transformers encoder with its weights) or hf:IMAGES+TEXTS (image–text, two of them)",
    "hf-config:FOLDER or hf-config:IMAGES+TEXTS (the same with random weights, from a folder's config.json)",
)

"""Loaders from files: text, time series, tables, images, retrieval benchmarks."""

from keyquery.learn.data.images import Images, load_images
from keyquery.learn.data.retrieval import Revisited, load_revisited
from keyquery.learn.data.series import Series, load_ts
from keyquery.learn.data.tables import Table, load_table
from keyquery.learn.data.text import encode_corpus, read_column, read_corpus, train_tokenizer, unwrap, windows
from keyquery.support.images import read_image

__all__ = [
    "Images",
    "Revisited",
    "Series",
    "Table",
    "encode_corpus",
    "load_images",
    "load_revisited",
    "load_table",
    "load_ts",
    "read_column",
    "read_corpus",
    "read_image",
    "train_tokenizer",
    "unwrap",
    "windows",
]

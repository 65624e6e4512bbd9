"""Loaders from files: text, time series, tables, images, retrieval benchmarks."""

from keyquery.data.images import Images, load_images, read_image
from keyquery.data.retrieval import Revisited, load_revisited
from keyquery.data.series import Series, load_ts
from keyquery.data.tables import Table, load_table
from keyquery.data.text import encode_corpus, read_column, read_corpus, train_tokenizer, unwrap, windows

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

"""Loaders that take a path: text, time series, tables, images."""

from keyquery.data.series import Series, load_ts
from keyquery.data.text import encode_corpus, read_corpus, train_tokenizer, unwrap, windows

__all__ = [
    "Series",
    "encode_corpus",
    "load_ts",
    "read_corpus",
    "train_tokenizer",
    "unwrap",
    "windows",
]

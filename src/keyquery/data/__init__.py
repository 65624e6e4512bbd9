"""Loaders that take a path."""

from keyquery.data.text import encode_corpus, read_corpus, train_tokenizer, unwrap, windows

__all__ = ["encode_corpus", "read_corpus", "train_tokenizer", "unwrap", "windows"]

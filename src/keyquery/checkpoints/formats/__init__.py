"""Readers of file formats: GGUF, llama2.c, and files of torch."""

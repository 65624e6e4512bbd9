"""What tests of the monitor share: small language models, and monitors that raise what goes wrong and print nothing."""

import torch

import keyquery as kq
from keyquery.layers import LanguageModel, Shape


def language_model(kernel="general", **options):
    """Two layers of four heads."""
    torch.manual_seed(0)
    return LanguageModel(Shape(60, 32, 2, 4, 32, True, kernel, rope=True, **options)).train()


def monitored(model, every=1, **options):
    return kq.Monitor(model, **{"every": every, "strict": True, "on_alarm": lambda alarm: None, **options})

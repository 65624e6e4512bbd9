"""Batches fit the arguments of any model, and its vocabulary is that of the embedding which its ids enter."""

import torch
from torch import nn

import keyquery as kq
from keyquery.listening.inputs.data import as_arguments, embedded_tokens, takes, token_argument
from tests.instruments.plain import GPT, ViT


class Loose(nn.Module):
    """A model that takes anything."""

    def forward(self, *args, **kwargs):
        return kwargs


def test_token_ids_go_to_the_first_argument():
    assert token_argument(GPT()) == "idx"
    assert token_argument(Loose()) == "input_ids"
    assert (takes(Loose(), "attention_mask"), takes(GPT(), "attention_mask"), takes(GPT(), "targets")) == (1, 0, 1)


def test_batches_that_fit_stay_as_they_are():
    batch = {"input_ids": torch.ones(1, 2, dtype=torch.long), "attention_mask": torch.ones(1, 2)}
    assert list(as_arguments(Loose(), batch)) == [batch]
    other = {"pixel_values": torch.zeros(1)}
    assert list(as_arguments(GPT(), other)) == [other]
    assert [list(part) for part in as_arguments(GPT(), {"input_ids": batch["input_ids"]})] == [["idx"]]


def test_rows_of_one_length_go_together_where_there_is_no_mask():
    ids = torch.arange(12).reshape(3, 4)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1]])
    parts = list(as_arguments(GPT(), {"input_ids": ids, "attention_mask": mask, "targets": ids}))
    assert [part["idx"].tolist() for part in parts] == [[[4, 5, 6, 7]], [[0, 1], [10, 11]]]
    assert [len(part["targets"]) for part in parts] == [1, 2]


def test_the_vocabulary_is_that_of_the_embedding_which_ids_enter():
    assert embedded_tokens(GPT(tokens=60, context=128)) == 60  # and not the larger one, of positions
    assert embedded_tokens(ViT()) is None
    assert embedded_tokens(kq.Encoder(8, 1, 2)) is None
    model = GPT().train()
    embedded_tokens(model)
    assert model.training
    assert not model.wte._forward_pre_hooks

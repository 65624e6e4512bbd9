"""Losses per sequence: of predictions that real tokens make of real tokens, and of nothing else."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from keyquery.instruments.ablation.losses import hide, losses_of, masked_loss, next_token_loss


class Table(nn.Module):
    """Logits by the token at hand alone; where `broken` is, they are NaN."""

    def __init__(self, broken=None):
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 9))
        self.broken = broken

    def forward(self, input_ids, attention_mask=None):
        logits = self.table[input_ids]
        return logits if self.broken is None else logits.masked_fill((input_ids == self.broken)[..., None], torch.nan)


IDS = torch.tensor([[0, 0, 1, 2, 3], [4, 5, 6, 7, 8], [2, 3, 0, 0, 0], [0, 0, 0, 0, 5], [0, 7, 0, 8, 1]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 1], [0, 1, 0, 1, 1]])
PAIRS = ([(1, 2), (2, 3)], [(4, 5), (5, 6), (6, 7), (7, 8)], [(2, 3)], [(8, 1)])  # the fourth row has none


def test_only_real_tokens_predict_real_tokens():
    """Padding may stand anywhere, and may be NaN."""
    model = Table(broken=0)
    wanted = [
        cross_entropy(model.table[[token for token, _ in pairs]], torch.tensor([target for _, target in pairs]))
        for pairs in PAIRS
    ]
    losses = next_token_loss(model, {"input_ids": IDS, "attention_mask": MASK})
    torch.testing.assert_close(losses, torch.stack(wanted).double())
    rows = [
        next_token_loss(model, {"input_ids": ids[None], "attention_mask": mask[None]})
        for ids, mask in zip(IDS, MASK, strict=True)
    ]
    assert [len(row) for row in rows] == [1, 1, 1, 0, 1]
    torch.testing.assert_close(torch.cat(rows), losses)


def test_masked_tokens_are_real_and_a_sequence_without_one_is_left_out():
    model, batch = Table(), {"input_ids": IDS, "attention_mask": MASK}
    for seed in range(20):
        hidden = hide(batch, special={5}, seed=seed)
        assert hidden.any(1).tolist() == [True, True, True, False, True]
        assert not (hidden & ((MASK == 0) | (IDS == 5))).any()
    targets = [ids[row] for ids, row in zip(IDS, hidden, strict=True) if row.any()]
    expected = [cross_entropy(model.table[[8] * len(row)], row) for row in targets]
    torch.testing.assert_close(masked_loss(8, {5}, seed=19)(model, batch), torch.stack(expected).double())


def test_sequences_without_any_loss_are_refused():
    batch = {"input_ids": IDS[:, :1], "attention_mask": MASK[:, 1:2]}
    with pytest.raises(ValueError, match="no sequence has a loss") as error:
        losses_of(Table(), [batch, batch], next_token_loss)
    assert "\n" not in str(error.value)


class Tuple(nn.Module):
    """A GPT as users write it: ids under a name of its own, and logits with a loss that is None."""

    def __init__(self, width=9):
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, width))

    def forward(self, idx, targets=None):
        return self.table[idx], targets


def test_ids_of_any_name_and_logits_in_a_tuple_will_do():
    model = Tuple()
    expected = [cross_entropy(model.table[row[:-1]], row[1:]) for row in IDS]
    torch.testing.assert_close(next_token_loss(model, {"idx": IDS}), torch.stack(expected).double())


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (Tuple(), {"idx": IDS.float()}, "batches must hold token ids as 'input_ids', got idx"),
        (Tuple(width=4), {"idx": IDS}, r"returns \(5, 5, 4\), not logits for each of \(5, 5\): pass a loss"),
        (nn.Sequential(nn.Embedding(9, 9), nn.Flatten()), {"input": IDS}, "not logits for each"),
    ],
)
def test_what_has_no_loss_by_token_is_refused_in_one_sentence(model, batch, message):
    with pytest.raises(ValueError, match=message) as error:
        next_token_loss(model, batch)
    assert "\n" not in str(error.value)

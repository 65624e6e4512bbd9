"""A model runs on batches, or says which it cannot take."""

import pytest
import torch

from keyquery.listening import running


def test_a_batch_that_a_model_cannot_take_is_named():
    pytest.importorskip("transformers")
    from keyquery.proof.families import tiny_model

    model = tiny_model("bert", max_position_embeddings=8)
    with (
        running(model) as run,
        pytest.raises(ValueError, match=r"does not run on input_ids \(1, 9\): .*context is 8 tokens: use a smaller"),
    ):
        run({"input_ids": torch.ones(1, 9, dtype=torch.long)})
    with (
        running(tiny_model("clip")) as run,
        pytest.raises(ValueError, match=r"CLIPModel does not run on input_ids \(1, 5\)"),
    ):
        run({"input_ids": torch.ones(1, 5, dtype=torch.long)})

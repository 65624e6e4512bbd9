"""The study of causes: its reviews, its orders and searches."""

import lzma

import numpy as np
import pytest
import torch
from keyquery_studies import causes as module
from keyquery_studies.causes import (
    BLANK,
    CHOOSE,
    FIRST,
    LEARN,
    RARE,
    TEST,
    Queries,
    ReviewModel,
    hide,
    reviews,
    subsets,
)


@pytest.fixture
def films(tmp_path):
    """A word at the end tells whether a film is liked."""
    rng, lines = np.random.default_rng(0), ["split\tlabel\ttext"]
    for number in range(60):
        label = int(rng.integers(2))
        words = [*rng.choice(["a", "film", "of", "it", "the"], 8), ("awful", "superb")[label], f"once{number}", "!"]
        lines.append(f"{('train', 'test')[number % 3 == 2]}\t{label}\t{' '.join(words)}")
    path = tmp_path / "films.tsv.xz"
    path.write_bytes(lzma.compress("\n".join(lines).encode()))
    return path


def test_reviews_are_a_masked_token_and_their_last_words(films, tmp_path):
    arrays = reviews(films)
    assert arrays["ids"].shape == (60, 128)
    assert (arrays["ids"][:, 0] == BLANK).all()
    assert (arrays["ids"][:, 10] == RARE).all()
    assert all(len(set(arrays["ids"][arrays["answers"] == label, 9])) == 1 for label in (0, 1))
    assert [int((arrays["parts"] == part).sum()) for part in (LEARN, CHOOSE, TEST)] == [36, 4, 20]
    path = tmp_path / "long.tsv"
    rows = [f"{split}\t1\t" + " ".join(["word"] * 300 + ["end"]) for split in ["train"] * 20 + ["test"]]
    path.write_text("split\tlabel\ttext\n" + "\n".join(rows) + "\n")
    assert set(reviews(path)["ids"][:, -1]) == {FIRST}  # "end" sorts before "word"
    path.write_text("split\tlabel\ttext\ntrain\t7\tgood\n")
    with pytest.raises(ValueError, match="label must be 0 or 1, got 7"):
        reviews(path)


def test_hidden_words_are_a_share_of_each_review_and_never_the_first():
    ids = torch.full((400, 50), 7)
    ids[:, 0], ids[:, 40:] = BLANK, 0
    hidden = hide(ids, torch.Generator().manual_seed(0))
    assert torch.equal(hidden[:, 40:], ids[:, 40:])
    shares = (hidden[:, 1:40] == BLANK).double().mean(1)
    assert abs(float(shares.mean()) - 0.4) < 0.03  # uniform between 0 and .8
    assert shares.max() > 0.6 > 0.2 > shares.min()


class Rigged(torch.nn.Module):
    """Says 0 unless words 5 and 6 are both gone."""

    def forward(self, ids):
        gone = ~((ids == 5).any(1) | (ids == 6).any(1))
        return torch.stack((1 - gone.float(), gone.float()), 1)


def test_searches_find_what_changes_a_prediction():
    queries = Queries(Rigged(), torch.tensor([1, 5, 7, 6, 8]))
    assert queries.first(subsets([2, 4, 1, 3])) == (2, 4 + 6)  # all single ones, and the last of the pairs
    assert queries.first(subsets([1, 3, 2, 4])) == (2, 4 + 1)
    assert queries.first(subsets([2, 4, 1, 3]), 9) == (None, 9)
    assert queries.first(module.prefixes([2, 1, 3, 4])) == (3, 3)
    assert queries.first(module.prefixes([2, 4])) == (None, 2)


def test_gradient_times_input_is_the_change_of_the_logit_when_a_word_grows():
    torch.manual_seed(0)
    model, ids = ReviewModel(12).eval().double(), torch.tensor([BLANK, 5, 7, 6, 8])
    found = module.sensitivity(model, ids, 1)
    vectors, mask = model.tokens(ids[None]), torch.ones(1, 5, dtype=torch.bool)
    for word in range(5):
        grown, shrunk = (vectors.clone() for _ in range(2))
        grown[0, word] *= 1 + 1e-4
        shrunk[0, word] *= 1 - 1e-4
        slope = (model.logits(grown, mask) - model.logits(shrunk, mask))[0, 1] / 2e-4
        assert float(found[word]) == pytest.approx(slope.item(), rel=1e-4, abs=1e-9)


@pytest.mark.slow
def test_the_study_explains_by_every_order_and_search(study, films):
    reading = study("causes", "--reviews", films, "--seed", 0, "--count", 6, "--steps", 40)
    assert len(reading.rows) == 6
    assert {row["order"] for row in reading.summary()} == {"causes", "attention", "gradient", "place", "random"}
    assert all(
        row["fewer"] is None or row["fewer"].change == 0 for row in reading.summary() if row["order"] == "causes"
    )

"""Windows of event streams: every event is predicted once, with its history."""

import numpy as np
import pytest
import torch

from keyquery.learn.events.windows import Clock, cut, ends
from keyquery.learn.inputs.event_streams import stream_of


@pytest.mark.parametrize("window", [2, 3, 8, 100])
def test_every_event_but_the_first_is_foretold_once_with_context(window):
    rng = np.random.default_rng(0)
    lengths = [1, 2, 3, 9, 40, 7, 1]
    groups = rng.permutation(np.repeat(np.arange(7), lengths))
    stream = stream_of(np.arange(len(groups)), np.arange(len(groups)) / 3, groups)
    windows, owners = cut(stream, Clock(0.5), window, "cpu")
    found = []
    for number, owner in enumerate(owners):
        batch = windows.take([number])
        first, end = stream.offsets[owner], stream.offsets[owner + 1]
        assert batch.real.all()
        assert batch.types.shape[1] <= window
        where = int(np.flatnonzero(stream.types == int(batch.types[0, 0]))[0])
        assert first <= where < end
        n = batch.types.shape[1]
        assert torch.equal(batch.next_types[0], torch.from_numpy(stream.types[where + 1 : where + n + 1]))
        assert np.allclose(batch.gaps[0], np.diff(stream.times)[where : where + n] / 0.5)
        seen = batch.counted[0].nonzero().squeeze(1)
        assert int(seen[0]) >= min(window - window // 2, where - first + int(seen[0]))
        found += batch.next_types[batch.counted].tolist()
    expected = np.delete(stream.types, stream.offsets[:-1])
    assert sorted(found) == sorted(expected)


def test_padding_is_told():
    stream = stream_of(np.arange(6), [1e9, 1e9 + 1, 1e9 + 3, 5, 6, 8], [0, 0, 0, 1, 1, 1])
    windows = ends(stream, Clock(1.0), 2, "cpu")._replace(lengths=torch.tensor([2, 1]))
    batch = windows.take([0, 1])
    assert batch.real.tolist() == [[True, True], [True, False]]
    assert batch.times[0].tolist() == [1.0, 3.0]

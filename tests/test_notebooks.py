"""The notebooks of docs/notebooks: stored with outputs, on the site, and what their text says holds."""

import ast
import json
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "docs/notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def codes(path):
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def run(name):
    """All cells in order, without a kernel."""
    names = {"__name__": name}
    for code in codes(FOLDER / f"{name}.ipynb"):
        exec(compile(code, name, "exec"), names)
    return names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_outputs_and_is_on_the_site(path):
    """That they are the outputs of today is checked where they are run: by `make docs`."""
    notebook = json.loads(path.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(bool(cell["outputs"]) for cell in cells) > len(cells) / 2
    assert path.stat().st_size < 1_000_000
    assert "/home/" not in path.read_text()
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    for code in codes(path):
        ast.parse(code)
    assert f"notebooks/{path.stem}.md" in (FOLDER.parent.parent / "mkdocs.yml").read_text()


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["build", "look", "own_model"]


@pytest.mark.slow
def test_look_the_decoder_attends_by_position_and_the_encoder_by_content():
    names = run("look")
    mean = {name: names[name].to_frame().mean(numeric_only=True) for name in ("encoder", "decoder")}
    assert mean["decoder"].on_data_position > 0.5 > mean["decoder"].on_data_popularity
    layers = names["encoder"].to_frame().groupby("layer").mean(numeric_only=True)
    assert layers.on_data_position[0] > 0.9
    assert (layers.on_data_symmetric[1:] > 0.5).all()
    assert (layers.on_data_position[1:] < 0.1).all()
    words = [token.strip() for token in names["encoder"].sample["tokens"]]
    shown = names["parts"](_head(names["encoder"], 1, 0), causal=False)
    for word in ("daughter", "letter"):
        here, again = [place for place, other in enumerate(words) if other == word]
        assert shown["symmetric"][here].topk(2).indices.sort().values.tolist() == [here, again]
    slope = names["parts"](_head(names["decoder"], 2, 2), causal=True)["position"]
    for query in range(8, 24):
        assert slope[query].topk(4).indices.tolist() == [query, query - 1, query - 2, query - 3]


def _head(look, layer, head):
    return next(row for row in look.heads if (row["layer"], row["head"]) == (layer, head))


@pytest.mark.slow
def test_build_each_structure_learns_its_own_task():
    names = run("build")
    error = {
        key: (log.rows[9]["loss"], log.rows[-1]["loss"])  # after a hundred steps, and at the end
        for key, log in names["logs"].items()
    }
    for key in (("alike", "symmetric"), ("alike", "general"), ("next", "skew"), ("next", "general")):
        assert error[key][0] < 0.05, key
        assert error[key][1] < 0.01, key
    for key in (("alike", "skew"), ("next", "symmetric")):
        assert error[key][1] > 0.2, key
    for task, label in {"alike": "symmetric", "next": "skew"}.items():
        look = names["kq"].look(names["models"][task, "general"], inputs=[{"x": names["x"]}])
        assert look.heads[0]["label"] == label


@pytest.mark.slow
def test_own_model_goes_off_and_comes_back(capsys):
    names = run("own_model")
    _, *said = capsys.readouterr().out.splitlines()
    as_it_is, without, back = (line.split("…")[1] for line in said)
    assert as_it_is == back != without
    found = names["found"].groupby("part")["change"].sum()
    assert found["position"] == found.max()
    assert found["symmetric"] > 0.01
    fresh = names["kq"].look(names["LlamaForCausalLM"](names["LlamaConfig"](**names["size"], **names["heads"])))
    assert abs(torch.tensor([head["raw"]["symmetry"] for head in fresh.heads]).mean()) < 0.05

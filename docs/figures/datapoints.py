"""Draws datapoints.svg: which columns and which training rows the class of a tumour leans on."""

from pathlib import Path

from sklearn.datasets import load_breast_cancer

import keyquery as kq
from keyquery.pages import picture_bytes


def main() -> None:
    """Train on some columns of a table that scikit-learn ships, and write the picture."""
    table = load_breast_cancer(as_frame=True)
    X = table.data[[name for name in table.data.columns if name.startswith("mean")]]
    y = table.target.map({0: "malignant", 1: "benign"})
    model = kq.NPTClassifier(embedding=8, depth=4, heads=2, steps=400, random_state=0, device="cpu")
    model.fit(X[:400], y[:400])
    path = Path(__file__).with_name("datapoints.svg")
    path.write_bytes(picture_bytes(path, model.explain(X[500:501])))
    print(f"{path}: held-out accuracy {model.score(X[400:], y[400:]):.3f}")


if __name__ == "__main__":
    main()

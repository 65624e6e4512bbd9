"""Study `vision-language`: does a trainable patch encoder pay off, and does attention flow predict importance?

Variants learn from images with things in cells and sentences about two of them, and are asked about pairs of things
that were never said. Their flow is held against what the loss of words becomes when images are shuffled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keyquery.reading import Reading, digests, provenance
from keyquery.support.checks import check_choice, check_count
from keyquery.support.devices import pick_device
from keyquery.support.files import write_all
from keyquery.support.progress import Progress
from keyquery.support.statistics import spearman
from keyquery_studies.common.comparisons import corrected, difference
from keyquery_studies.common.rows import FORMER, over_seeds
from keyquery_studies.common.runner import device_name, run_jobs, study_folder
from keyquery_studies.common.store import array_file, digest_of, npz_bytes
from keyquery_studies.rerank.embeddings import load_dino
from keyquery_studies.vision_language.scenes import cifar
from keyquery_studies.vision_language.trial import LEARNED, READINGS, SIZES, VARIANTS, ParserTrial

SCORES = (
    "matching",
    "relations",
    "matching_of_two",
    "relations_of_two",
    "things",
    "filled",
    "filled_both",
    "shuffled_matching",
    "shuffled_relations",
)
RANKS = tuple(f"{way}_at_{most}" for way in ("texts", "images") for most in (1, 5, 10))
FLOWS = (*READINGS, "to_text")
SCENES = {"digits": 20_000, "fine digits": 30_000, "cifar": 60_000}  # training scenes
EPOCHS = 10
SEEDS = (0, 1, 2, 3, 4)
FEWEST = 3  # trainings of a set, for an interval
DRAWS = 1000  # of the bootstrap


@dataclass(frozen=True, kw_only=True)
class VisionLanguageStudy(Reading, kind="vision-language study"):
    """Accuracy of every variant, loss with ablated score parts, and the correlation of flow with the loss."""

    former = FORMER

    rows: Sequence[Mapping[str, Any]]  # one per training

    def records(self) -> list[dict[str, Any]]:
        """One row per training, without its course."""
        return [{k: v for k, v in row.items() if k not in ("course", "layers", "turned")} for row in self.rows]

    def summary(self) -> list[dict[str, Any]]:
        """Mean and sd over seeds, one row per dataset and variant."""
        return over_seeds(self.rows, ("dataset", "variant"), (*SCORES, *RANKS, "seconds"))

    def contrasts(self) -> list[dict[str, Any]]:
        """The parser less every variant, paired by seed, p by Holm over all; `better` in how many seeds it is ahead."""
        runs: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for row in self.rows:
            runs.setdefault((row["dataset"], row["variant"]), []).append(row)
        rows = []
        for dataset, variant in runs:
            parser = runs.get((dataset, "parser"), [])
            if variant != "parser" and parser:
                for name in ("matching", "relations", "filled_both"):
                    own = {row["seed"]: row[name] for row in runs[dataset, variant]}
                    better = sum(row[name] > own.get(row["seed"], math.inf) for row in parser)
                    found = difference(parser, runs[dataset, variant], name)
                    rows.append({"dataset": dataset, "less": variant, "of": name, "better": better, **found})
        return corrected(rows)

    def turned(self) -> list[dict[str, Any]]:
        """Increase of the matching loss without a part, mean and sd over seeds, one row per variant and task.

        Changes are of the loss in nats; `loss` is that of the whole network.
        """
        rows = [
            {"dataset": row["dataset"], "variant": row["variant"], "seed": row["seed"], **change}
            for row in self.rows
            for change in row["turned"]
        ]
        return over_seeds(rows, ("dataset", "variant", "task", "part"), ("change", "loss"))

    def correlations(self) -> list[dict[str, Any]]:
        """Spearman's correlation of flow above chance with the rise of the text loss, a row a set, reading and kind.

        Over "training": checkpoints of all trainings, images shuffled, against flow, mean over the layers. Over
        "layers": the layers of all trained networks, words reading other images in that layer alone, against its flow.
        `within` is the mean of the correlations within each training. Intervals are 95 %, by drawing trainings anew;
        sets with fewer than three trainings have none, and are left out.
        """
        correlations = []
        for dataset in dict.fromkeys(row["dataset"] for row in self.rows):
            rows = [row for row in self.rows if row["dataset"] == dataset]
            if len(rows) < FEWEST:
                continue
            for kind, name in (("training", "course"), ("layers", "layers")):
                for reading in FLOWS:
                    groups = [[(float(np.mean(p[reading])), p["rise"]) for p in row[name]] for row in rows]
                    correlations.append({"dataset": dataset, "over": kind, "reading": reading, **correlated(groups)})
        return correlations


def correlated(groups: Sequence[Sequence[tuple[float, float]]], draws: int | None = None) -> dict[str, Any]:
    """Spearman's correlation of all points, and its 95 % interval by bootstrap over groups (default: 1,000 samples)."""
    arrays, rng = [np.array(group, dtype=np.float64) for group in groups], np.random.default_rng(0)
    drawn = []
    for _ in range(draws or DRAWS):
        some = np.concatenate([arrays[i] for i in rng.integers(len(arrays), size=len(arrays))])
        drawn.append(_rises(some))
    whole, inner = np.concatenate(arrays), [_rises(array) for array in arrays]
    low, high = np.nanquantile(drawn, (0.025, 0.975))
    return {
        "correlation": _rises(whole),
        "low": float(low),
        "high": float(high),
        "within": float(np.nanmean(inner)),
        "points": len(whole),
        "trainings": len(arrays),
    }


def _rises(pairs: np.ndarray) -> float:
    correlation = spearman(pairs[:, 0], pairs[:, 1])
    return math.nan if correlation is None else correlation


def run(
    data: str | Path | None = None,
    out: str | Path | None = None,
    weights: str | Path | None = None,
    sets: Sequence[str] = (),
    variants: Sequence[str] = (),
    seeds: Sequence[int] = SEEDS,
    epochs: int = EPOCHS,
    scenes: int | None = None,
    device: str = "auto",
    workers: int = 1,
    progress: Progress | None = None,
) -> VisionLanguageStudy:
    """Run the study on `sets`: "digits" and "fine digits", scikit-learn's, and "cifar", the images of `data`.

    `data` is for `kq.data.load_images`, and `weights` are those of a DINOv2 backbone; without them that variant is left
    out, and without `data` "cifar". Every training goes `epochs` times through `scenes` images (default: 20,000,
    30,000 and 60,000). With `out`, every result is kept there, and finished trainings are not repeated.

    Parameters
    ----------
    data
        For `kq.data.load_images`. Default: no "cifar".
    out
        A folder for results: finished trainings are not repeated. Default: none.
    weights
        Of a DINOv2 backbone. Default: none.
    sets
        Names of datasets. Default: all.
    variants
        Names of variants. Default: all.
    seeds
        One training each.
    epochs, scenes
        Epochs, and images per epoch.
    device
        Where to train. Default: "auto", a GPU if there is one.
    workers
        Processes that share the device. Default: 1.
    progress
        Wraps iterables in progress bars. Default: none.

    Returns
    -------
    VisionLanguageStudy
        A Reading.
    """
    check_count("epochs", epochs)
    check_count("workers", workers)
    check_count("scenes", scenes, optional=True)
    chosen = pick_device(device)
    wanted = tuple(sets) or tuple(name for name in SCENES if name != "cifar" or data is not None)
    _check(wanted, variants, data, weights)
    runs = tuple(dict.fromkeys(seeds))
    with study_folder(out) as folder:
        images = {"digest": keep_images(str(data), folder)} if "cifar" in wanted else {}
        backbone = {} if weights is None else {"weights": str(weights), "backbone": backbone_digest(weights)}
        jobs = [
            ParserTrial(
                dataset=name,
                variant=variant,
                seed=seed,
                epochs=epochs,
                count=SCENES[name] if scenes is None else scenes,
                **(images if name == "cifar" else {}),
                **(backbone if variant == "DINOv2" else {}),
            )
            for seed in runs
            for name in wanted
            for variant in variants or variants_of(name, weights is not None)
        ]
        rows = run_jobs(jobs, folder, chosen, workers, progress)
    facts = {
        "learned": LEARNED,
        "sizes": SIZES,
        "variants": VARIANTS,
        "epochs": epochs,
        "scenes": scenes or SCENES,
    }
    return VisionLanguageStudy(rows=rows, provenance=provenance(device=device_name(chosen), seeds=runs, **facts))


def _check(wanted: Sequence[str], variants: Sequence[str], data: Any, weights: Any) -> None:
    for name in wanted:
        check_choice("set", name, tuple(SIZES))
    for name in variants:
        check_choice("variant", name, tuple(VARIANTS))
    if "cifar" in wanted and data is None:
        raise ValueError("cifar needs images: pass a file or a folder as data (--data)")
    if "DINOv2" in variants and weights is None:
        raise ValueError("DINOv2 needs the weights of its backbone: pass them as weights (--weights)")


def variants_of(dataset: str, dino: bool) -> tuple[str, ...]:
    """All variants; DINOv2 is for photographs."""
    return tuple(name for name in VARIANTS if name != "DINOv2" or (dino and dataset == "cifar"))


def backbone_digest(weights: str | Path) -> str:
    """One digest of all tensors of a backbone."""
    each = digests(load_dino(weights))
    return digest_of(*(each[name] for name in sorted(each)))


def keep_images(source: str | Path, folder: Path) -> str:
    """Cache images of each class in `folder`, and return their digest."""
    things = cifar(source)
    digest = digest_of(things.pixels, things.labels)
    arrays = {"pixels": things.pixels, "labels": things.labels, "names": np.array(things.names)}
    folder.mkdir(parents=True, exist_ok=True)
    write_all({folder / array_file("cifar", digest): npz_bytes(arrays)})
    return digest

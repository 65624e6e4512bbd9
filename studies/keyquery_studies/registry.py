"""Kinds of readings that studies return, and how each is displayed: by name, imported on use."""

from __future__ import annotations

KINDS = {
    "causes study": "keyquery_studies.causes.study",
    "circuit": "keyquery_studies.circuit.study",
    "datapoint study": "keyquery_studies.datapoints.study",
    "depth study": "keyquery_studies.depth.study",
    "dial": "keyquery_studies.dial.study",
    "kernels": "keyquery_studies.kernels.study",
    "lineage study": "keyquery_studies.lineage.study",
    "mask study": "keyquery_studies.mask.study",
    "objectives": "keyquery_studies.objectives.study",
    "primal study": "keyquery_studies.primal.study",
    "rerank study": "keyquery_studies.rerank.study",
    "stability study": "keyquery_studies.stability.study",
    "starts study": "keyquery_studies.starts.study",
    "time study": "keyquery_studies.time.study",
    "transport study": "keyquery_studies.transport.study",
    "vision-language study": "keyquery_studies.vision_language.study",
    "words study": "keyquery_studies.words.study",
}

# The module with the tables of a study (`lines`) and its figures; the first is the default.
SHOWS = {kind: module.replace(".study", ".report") for kind, module in KINDS.items()}

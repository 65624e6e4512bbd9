"""Kinds of readings that studies return, and how each is displayed: by name, imported on use."""

from __future__ import annotations

from keyquery.kinds import Kind


def _kind(study: str) -> Kind:
    """The class of a study, and the module with its tables (`lines`) and figures; the first is the default."""
    return Kind(f"keyquery_studies.{study}.study", f"keyquery_studies.{study}.report")


KINDS = {
    "causes study": _kind("causes"),
    "circuit": _kind("circuit"),
    "datapoint study": _kind("datapoints"),
    "depth study": _kind("depth"),
    "dial": _kind("dial"),
    "kernels": _kind("kernels"),
    "lineage study": _kind("lineage"),
    "mask study": _kind("mask"),
    "objectives": _kind("objectives"),
    "primal study": _kind("primal"),
    "rerank study": _kind("rerank"),
    "stability study": _kind("stability"),
    "starts study": _kind("starts"),
    "time study": _kind("time"),
    "transport study": _kind("transport"),
    "vision-language study": _kind("vision_language"),
    "words study": _kind("words"),
}

"""Kinds of readings that studies return, and how each is displayed: by name, imported on use."""

from __future__ import annotations

from keyquery.kinds import Kind


def _kind(study: str, *figures: str) -> Kind:
    """The class of a study, its table, and its figures; the first is the default."""
    package = f"keyquery_studies.{study}"
    return Kind(f"{package}.study", f"{package}.report:tables", {name: f"{package}.figure:{name}" for name in figures})


KINDS = {
    "causes study": _kind("causes", "changed"),
    "circuit": _kind("circuit", "followed"),
    "datapoint study": _kind("datapoints", "between"),
    "depth study": _kind("depth", "depths"),
    "dial": _kind("dial", "parts", "layers"),
    "kernels": _kind("kernels", "panels"),
    "lineage study": _kind("lineage", "trail"),
    "mask study": _kind("mask", "shares"),
    "objectives": _kind("objectives", "curves"),
    "primal study": _kind("primal", "worth"),
    "rerank study": _kind("rerank", "ranks"),
    "stability study": _kind("stability", "warnings"),
    "starts study": _kind("starts", "curves"),
    "time study": _kind("time", "gains"),
    "transport study": _kind("transport", "carried"),
    "vision-language study": _kind("vision_language", "seen"),
    "words study": _kind("words", "starts"),
}

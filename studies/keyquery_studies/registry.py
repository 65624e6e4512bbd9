"""Kinds of readings that studies return, and how each is displayed: by name, imported on use."""

from __future__ import annotations

from keyquery.pages.kinds import Display

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


def _display(study: str, *figures: str) -> Display:
    """The table of a study, and its figures; the first is the default."""
    package = f"keyquery_studies.{study}"
    return Display(f"{package}.report:tables", {name: f"{package}.figure:{name}" for name in figures})


DISPLAYS = {
    "causes study": _display("causes", "changed"),
    "circuit": _display("circuit", "followed"),
    "datapoint study": _display("datapoints", "between"),
    "depth study": _display("depth", "depths"),
    "dial": _display("dial", "parts", "layers"),
    "kernels": _display("kernels", "panels"),
    "lineage study": _display("lineage", "trail"),
    "mask study": _display("mask", "shares"),
    "objectives": _display("objectives", "curves"),
    "primal study": _display("primal", "worth"),
    "rerank study": _display("rerank", "ranks"),
    "stability study": _display("stability", "warnings"),
    "starts study": _display("starts", "curves"),
    "time study": _display("time", "gains"),
    "transport study": _display("transport", "carried"),
    "vision-language study": _display("vision_language", "seen"),
    "words study": _display("words", "starts"),
}

"""Kinds of readings that studies return, and how each is displayed: by name, imported on use."""

from __future__ import annotations

from keyquery.kinds import Kind


def _kind(study: str) -> Kind:
    """The class of a study, and the module with its tables (`lines`) and figures; the first is the default."""
    return Kind(f"keyquery_studies.{study}.study", f"keyquery_studies.{study}.report")


def _module(study: str) -> Kind:
    """A study in one module, with its class, tables and figures."""
    return Kind(f"keyquery_studies.{study}", f"keyquery_studies.{study}")


KINDS = {
    "causes study": _module("causes"),
    "circuit": _kind("circuit"),
    "datapoint study": _module("archive"),
    "depth study": _module("archive"),
    "dial": _module("dial"),
    "kernels": _kind("kernels"),
    "lineage study": _kind("lineage"),
    "mask study": _module("mask"),
    "objectives": _kind("objectives"),
    "primal study": Kind("keyquery_studies.primal.study", "keyquery_studies.primal.study"),
    "rerank study": _module("rerank"),
    "stability study": _kind("stability"),
    "starts study": _kind("starts"),
    "time study": _module("time"),
    "transport study": _module("archive"),
    "vision-language study": _module("archive"),
    "words study": _module("words"),
}

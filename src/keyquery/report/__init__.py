"""A Reading to notebook, page and picture; `report.terminal`, which needs rich, is imported by its user."""

from keyquery import estimators, instruments, studies, survey  # so that every kind of reading is known
from keyquery.layers.primal import PrimalReading
from keyquery.layers.time import TimeKernel
from keyquery.report import page
from keyquery.report.notebook import html
from keyquery.report.picture import check_picture, picture_bytes, plot
from keyquery.surgery.distill import Distillation

__all__ = [
    "Distillation",
    "PrimalReading",
    "TimeKernel",
    "check_picture",
    "estimators",
    "html",
    "instruments",
    "page",
    "picture_bytes",
    "plot",
    "studies",
    "survey",
]

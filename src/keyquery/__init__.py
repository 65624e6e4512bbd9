"""keyquery: self-attention as an asymmetric kernel machine.

A head's score is a bilinear form M = QᵀK = S + A: the symmetric part compares, the skew part points.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from keyquery._version import __version__

if TYPE_CHECKING:
    from keyquery import data, models, survey, testing
    from keyquery.checkpoints import read
    from keyquery.estimators import (
        AffinityReranker,
        AlphaQueryExpansion,
        EventModel,
        KReciprocalReranker,
        NPTClassifier,
        NPTRegressor,
        Reranker,
        SeriesClassifier,
        TransportClassifier,
        VisualParser,
    )
    from keyquery.forms import Form, Rope, ksvd, monge_gap, nystrom
    from keyquery.instruments.ablation import ablate
    from keyquery.instruments.causes import causes
    from keyquery.instruments.comparison import compare
    from keyquery.instruments.depth import depth
    from keyquery.instruments.explanation import explain
    from keyquery.instruments.flow import flow
    from keyquery.instruments.geometry import look
    from keyquery.instruments.ranking import score_rankings
    from keyquery.instruments.separation import separation_rank
    from keyquery.instruments.transport import transport
    from keyquery.instruments.transport_lens import TransportLens
    from keyquery.instruments.words import Cooccurrence
    from keyquery.layers import (
        Attention,
        BochnerTime,
        Cache,
        CooccurrenceAttention,
        DatapointAttention,
        Decoder,
        Encoder,
        MercerTime,
        PrimalAttention,
        TimeAttention,
        regularizer,
    )
    from keyquery.reading import Reading
    from keyquery.surgery.dial import dial
    from keyquery.surgery.distill import distill
    from keyquery.surgery.head_output import ablate_heads
    from keyquery.surgery.project import project
    from keyquery.surgery.register import register
    from keyquery.surgery.swap import swap

# Names are imported when they are first used: the command line is up, and can be interrupted, before torch is.
_LAZY = {
    "AffinityReranker": "keyquery.estimators",
    "AlphaQueryExpansion": "keyquery.estimators",
    "Attention": "keyquery.layers",
    "BochnerTime": "keyquery.layers",
    "Cache": "keyquery.layers",
    "Cooccurrence": "keyquery.instruments.words",
    "CooccurrenceAttention": "keyquery.layers",
    "DatapointAttention": "keyquery.layers",
    "Decoder": "keyquery.layers",
    "Encoder": "keyquery.layers",
    "EventModel": "keyquery.estimators",
    "Form": "keyquery.forms",
    "KReciprocalReranker": "keyquery.estimators",
    "MercerTime": "keyquery.layers",
    "NPTClassifier": "keyquery.estimators",
    "NPTRegressor": "keyquery.estimators",
    "PrimalAttention": "keyquery.layers",
    "Reading": "keyquery.reading",
    "Reranker": "keyquery.estimators",
    "Rope": "keyquery.forms",
    "SeriesClassifier": "keyquery.estimators",
    "TimeAttention": "keyquery.layers",
    "TransportClassifier": "keyquery.estimators",
    "TransportLens": "keyquery.instruments.transport_lens",
    "VisualParser": "keyquery.estimators",
    "ablate": "keyquery.instruments.ablation",
    "ablate_heads": "keyquery.surgery.head_output",
    "causes": "keyquery.instruments.causes",
    "compare": "keyquery.instruments.comparison",
    "data": "keyquery.data",
    "depth": "keyquery.instruments.depth",
    "dial": "keyquery.surgery.dial",
    "distill": "keyquery.surgery.distill",
    "explain": "keyquery.instruments.explanation",
    "flow": "keyquery.instruments.flow",
    "ksvd": "keyquery.forms",
    "look": "keyquery.instruments.geometry",
    "models": "keyquery.models",
    "monge_gap": "keyquery.forms",
    "nystrom": "keyquery.forms",
    "project": "keyquery.surgery.project",
    "read": "keyquery.checkpoints",
    "register": "keyquery.surgery.register",
    "regularizer": "keyquery.layers",
    "score_rankings": "keyquery.instruments.ranking",
    "separation_rank": "keyquery.instruments.separation",
    "survey": "keyquery.survey",
    "swap": "keyquery.surgery.swap",
    "testing": "keyquery.testing",
    "transport": "keyquery.instruments.transport",
}

__all__ = [
    "AffinityReranker",
    "AlphaQueryExpansion",
    "Attention",
    "BochnerTime",
    "Cache",
    "Cooccurrence",
    "CooccurrenceAttention",
    "DatapointAttention",
    "Decoder",
    "Encoder",
    "EventModel",
    "Form",
    "KReciprocalReranker",
    "MercerTime",
    "NPTClassifier",
    "NPTRegressor",
    "PrimalAttention",
    "Reading",
    "Reranker",
    "Rope",
    "SeriesClassifier",
    "TimeAttention",
    "TransportClassifier",
    "TransportLens",
    "VisualParser",
    "__version__",
    "ablate",
    "ablate_heads",
    "causes",
    "compare",
    "data",
    "depth",
    "dial",
    "distill",
    "explain",
    "flow",
    "ksvd",
    "look",
    "models",
    "monge_gap",
    "nystrom",
    "project",
    "read",
    "register",
    "regularizer",
    "score_rankings",
    "separation_rank",
    "survey",
    "swap",
    "testing",
    "transport",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'keyquery' has no attribute {name!r}")
    module = import_module(_LAZY[name])
    return module if _LAZY[name] == f"keyquery.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__

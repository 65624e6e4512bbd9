"""The public names of keyquery, each with the module that it is in; `__init__.py` reads this list."""
# ruff: noqa: I001

from keyquery import data as data, models as models, survey as survey, testing as testing
from keyquery._version import __version__ as __version__
from keyquery.checkpoints import read as read
from keyquery.estimators.events.model import EventModel as EventModel
from keyquery.estimators.in_context.classifier import InContextClassifier as InContextClassifier
from keyquery.estimators.npt.estimators import NPTClassifier as NPTClassifier, NPTRegressor as NPTRegressor
from keyquery.estimators.rerank.base import (
    AffinityReranker as AffinityReranker,
    AlphaQueryExpansion as AlphaQueryExpansion,
)
from keyquery.estimators.rerank.heads import HeadReranker as HeadReranker
from keyquery.estimators.rerank.k_reciprocal import KReciprocalReranker as KReciprocalReranker
from keyquery.estimators.rerank.learned import Reranker as Reranker
from keyquery.estimators.series.classifier import SeriesClassifier as SeriesClassifier
from keyquery.estimators.series.ridge_classifier import ConvolutionRidgeClassifier as ConvolutionRidgeClassifier
from keyquery.estimators.transport.classifier import TransportClassifier as TransportClassifier
from keyquery.estimators.vision_language.parser import VisualParser as VisualParser
from keyquery.forms import Form as Form, Rope as Rope, ksvd as ksvd, monge_gap as monge_gap, nystrom as nystrom
from keyquery.instruments.ablation.ablate import ablate as ablate
from keyquery.instruments.attribution.attribution import attribute as attribute
from keyquery.instruments.attribution.wiring import wiring as wiring
from keyquery.instruments.causes.causes import causes as causes
from keyquery.instruments.causes.explain import explain as explain
from keyquery.instruments.cooccurrence.cooccurrence import Cooccurrence as Cooccurrence
from keyquery.instruments.depth.depth import depth as depth
from keyquery.instruments.depth.separation import separation_rank as separation_rank
from keyquery.instruments.discover.discover import discover as discover
from keyquery.instruments.flow.flow import flow as flow
from keyquery.instruments.look.compare import compare as compare
from keyquery.instruments.look.look import look as look
from keyquery.instruments.rankings.rankings import score_rankings as score_rankings
from keyquery.instruments.lineage.lineage import lineage as lineage
from keyquery.instruments.roles.roles import roles as roles
from keyquery.instruments.monitor.monitor import Monitor as Monitor
from keyquery.instruments.transport.lens import TransportLens as TransportLens
from keyquery.instruments.transport.transport import transport as transport
from keyquery.layers import (
    Attention as Attention,
    BochnerTime as BochnerTime,
    Cache as Cache,
    CooccurrenceAttention as CooccurrenceAttention,
    DatapointAttention as DatapointAttention,
    Decoder as Decoder,
    Encoder as Encoder,
    MercerTime as MercerTime,
    PrimalAttention as PrimalAttention,
    TimeAttention as TimeAttention,
    regularizer as regularizer,
)
from keyquery.listening.listen import listen as listen
from keyquery.reading import Reading as Reading
from keyquery.intervene.dial.dial import dial as dial
from keyquery.intervene.distill import distill as distill
from keyquery.intervene.handle import undo as undo
from keyquery.intervene.head_output import ablate_heads as ablate_heads
from keyquery.intervene.project.project import project as project
from keyquery.intervene.swap.swap import swap as swap

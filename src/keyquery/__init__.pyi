"""The public names of keyquery, each with the module that it is in; `__init__.py` reads this list."""
# ruff: noqa: I001

from keyquery import models as models, survey as survey, testing as testing
from keyquery._version import __version__ as __version__
from keyquery.checkpoints import read as read
from keyquery.learn.events.model import EventModel as EventModel
from keyquery.learn.in_context.classifier import InContextClassifier as InContextClassifier
from keyquery.learn.npt.estimators import NPTClassifier as NPTClassifier, NPTRegressor as NPTRegressor
from keyquery.learn.rerank.base import (
    AffinityReranker as AffinityReranker,
    AlphaQueryExpansion as AlphaQueryExpansion,
)
from keyquery.learn.rerank.choose import choose_reranker as choose_reranker
from keyquery.learn.rerank.diffusion import DiffusionReranker as DiffusionReranker
from keyquery.learn.rerank.heads import HeadReranker as HeadReranker
from keyquery.learn.rerank.k_reciprocal import KReciprocalReranker as KReciprocalReranker
from keyquery.learn.rerank.learned import Reranker as Reranker
from keyquery.learn.series.classifier import SeriesClassifier as SeriesClassifier
from keyquery.learn.series.ridge_classifier import ConvolutionRidgeClassifier as ConvolutionRidgeClassifier
from keyquery.learn.transport.classifier import TransportClassifier as TransportClassifier
from keyquery.learn.vision_language.parser import VisualParser as VisualParser
from keyquery.forms import Form as Form, Rope as Rope, ksvd as ksvd, monge_gap as monge_gap, nystrom as nystrom
from keyquery.instruments.ablation.ablate import ablate as ablate
from keyquery.instruments.attribution.attribution import attribute as attribute
from keyquery.instruments.attribution.wiring import wiring as wiring
from keyquery.learn.causes.causes import causes as causes
from keyquery.learn.causes.explain import explain as explain
from keyquery.learn.cooccurrence.cooccurrence import Cooccurrence as Cooccurrence
from keyquery.learn.depth.depth import depth as depth
from keyquery.learn.depth.separation import separation_rank as separation_rank
from keyquery.learn.discover.discover import discover as discover
from keyquery.instruments.flow.flow import flow as flow
from keyquery.instruments.look.compare import compare as compare
from keyquery.instruments.look.look import look as look
from keyquery.learn.rankings.rankings import score_rankings as score_rankings
from keyquery.instruments.lineage.lineage import lineage as lineage
from keyquery.instruments.roles.roles import roles as roles
from keyquery.instruments.monitor.monitor import Monitor as Monitor
from keyquery.learn.transport.lens import TransportLens as TransportLens
from keyquery.learn.transport.transport import transport as transport
from keyquery.learn import data as data
from keyquery.layers import Attention as Attention, Cache as Cache, Decoder as Decoder, Encoder as Encoder
from keyquery.learn.layers import (
    BochnerTime as BochnerTime,
    CooccurrenceAttention as CooccurrenceAttention,
    DatapointAttention as DatapointAttention,
    MercerTime as MercerTime,
    PrimalAttention as PrimalAttention,
    TimeAttention as TimeAttention,
    regularizer as regularizer,
)
from keyquery.listening.listen import listen as listen
from keyquery.reading import Reading as Reading
from keyquery.intervene.dial.dial import dial as dial
from keyquery.learn.distill import distill as distill
from keyquery.intervene.handle import undo as undo
from keyquery.intervene.head_output import ablate_heads as ablate_heads
from keyquery.intervene.project.project import project as project
from keyquery.intervene.swap.swap import swap as swap

"""The public names of keyquery, each with the module that it is in; `__init__.py` reads this list."""

from keyquery import data as data
from keyquery import models as models
from keyquery import survey as survey
from keyquery import testing as testing
from keyquery._version import __version__ as __version__
from keyquery.checkpoints import read as read
from keyquery.estimators.events.model import EventModel as EventModel
from keyquery.estimators.npt.estimators import NPTClassifier as NPTClassifier
from keyquery.estimators.npt.estimators import NPTRegressor as NPTRegressor
from keyquery.estimators.rerank.base import (
    AffinityReranker as AffinityReranker,
)
from keyquery.estimators.rerank.base import (
    AlphaQueryExpansion as AlphaQueryExpansion,
)
from keyquery.estimators.rerank.k_reciprocal import KReciprocalReranker as KReciprocalReranker
from keyquery.estimators.rerank.learned import Reranker as Reranker
from keyquery.estimators.series.classifier import SeriesClassifier as SeriesClassifier
from keyquery.estimators.transport.classifier import TransportClassifier as TransportClassifier
from keyquery.estimators.vision_language.parser import VisualParser as VisualParser
from keyquery.forms import Form as Form
from keyquery.forms import Rope as Rope
from keyquery.forms import ksvd as ksvd
from keyquery.forms import monge_gap as monge_gap
from keyquery.forms import nystrom as nystrom
from keyquery.instruments.ablation.ablate import ablate as ablate
from keyquery.instruments.causes.causes import causes as causes
from keyquery.instruments.causes.explain import explain as explain
from keyquery.instruments.cooccurrence.cooccurrence import Cooccurrence as Cooccurrence
from keyquery.instruments.depth.depth import depth as depth
from keyquery.instruments.depth.separation import separation_rank as separation_rank
from keyquery.instruments.flow.flow import flow as flow
from keyquery.instruments.look.compare import compare as compare
from keyquery.instruments.look.look import look as look
from keyquery.instruments.rankings.rankings import score_rankings as score_rankings
from keyquery.instruments.transport.lens import TransportLens as TransportLens
from keyquery.instruments.transport.transport import transport as transport
from keyquery.layers import (
    Attention as Attention,
)
from keyquery.layers import (
    BochnerTime as BochnerTime,
)
from keyquery.layers import (
    Cache as Cache,
)
from keyquery.layers import (
    CooccurrenceAttention as CooccurrenceAttention,
)
from keyquery.layers import (
    DatapointAttention as DatapointAttention,
)
from keyquery.layers import (
    Decoder as Decoder,
)
from keyquery.layers import (
    Encoder as Encoder,
)
from keyquery.layers import (
    MercerTime as MercerTime,
)
from keyquery.layers import (
    PrimalAttention as PrimalAttention,
)
from keyquery.layers import (
    TimeAttention as TimeAttention,
)
from keyquery.layers import (
    regularizer as regularizer,
)
from keyquery.reading import Reading as Reading
from keyquery.surgery.dial.dial import dial as dial
from keyquery.surgery.distill import distill as distill
from keyquery.surgery.head_output import ablate_heads as ablate_heads
from keyquery.surgery.project.project import project as project
from keyquery.surgery.rewriting.register import register as register
from keyquery.surgery.swap.swap import swap as swap

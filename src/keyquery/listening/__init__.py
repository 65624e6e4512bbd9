"""A live model and inputs in; queries and keys, their moments, and attention maps out."""

from keyquery.listening.hooks import Batch, batches_of, running
from keyquery.listening.inputs.batches import text_batches, typical_length
from keyquery.listening.maps import attention_maps
from keyquery.listening.parts.means import Moments
from keyquery.listening.parts.pairs import joint_moments, queries_and_keys

__all__ = [
    "Batch",
    "Moments",
    "attention_maps",
    "batches_of",
    "joint_moments",
    "queries_and_keys",
    "running",
    "text_batches",
    "typical_length",
]
